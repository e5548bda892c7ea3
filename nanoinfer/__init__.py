"""nanoinfer: a language-model inference engine to read in an evening and to run for real."""

from nanoinfer.config import EngineConfig
from nanoinfer.llm import LLM, LLMEngine
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
