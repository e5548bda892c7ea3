"""One engine in a process of its own: loaded once, then a line of JSON in, a line of JSON out.

In: `Settings` as JSON on the command line; requests on stdin: {"prompts": lists of token ids,
"output_lens": one number a prompt}. Out: first {"versions": ..., "num_threads": ...}, when the
engine is loaded; then for each request {"seconds": ..., "outputs": lists of new ids}.

All engines sample at the same temperature from all tokens, ignore eos, and use their own best
settings for a CPU. Only the standard library is imported on top: the interpreters of vLLM and
llama.cpp have no nanoinfer. What a library prints goes to stderr.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096  # longer than any work

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]  # (prompts, lengths) -> new ids


class Settings(NamedTuple):
    """What an engine's process is told when it is started."""

    engine: str  # a key of LOADERS
    model: str  # a folder, for llama.cpp a GGUF file
    dtype: str
    num_threads: int
    enable_prefix_caching: bool
    quantization: str | None
    is_prefill: bool  # nothing else counts


class Loaded(NamedTuple):
    generate: Generate
    num_threads: int  # that it really uses
    modules: tuple[str, ...]  # whose versions tell what was measured


def load_nanoinfer(settings: Settings) -> Loaded:
    import torch

    from nanoinfer import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": settings.dtype}
    if settings.quantization:
        options["quantization"] = settings.quantization
    caching = settings.enable_prefix_caching
    options |= {"enable_prefix_caching": caching, "skip_tokenizer_init": True}
    llm = LLM(settings.model, **options)

    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        shared: dict[str, Any] = {"temperature": TEMPERATURE, "ignore_eos": True}
        params = [SamplingParams(max_tokens=n, detokenize=False, **shared) for n in output_lens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return Loaded(generate, torch.get_num_threads(), ("nanoinfer", "torch"))


def load_vllm(settings: Settings) -> Loaded:
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.num_threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # two processes halve its speed on two cores
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        settings.model,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=settings.enable_prefix_caching,
        max_num_seqs=256,
    )

    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        shared: dict[str, Any] = {"temperature": TEMPERATURE, "ignore_eos": True}
        params = [SamplingParams(max_tokens=n, detokenize=False, **shared) for n in output_lens]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Loaded(generate, torch.get_num_threads(), ("vllm", "torch"))


def load_llama_cpp(settings: Settings) -> Loaded:
    """One sequence at a time, through the library's own sampler; the KV cache starts empty."""
    import llama_cpp

    llm = llama_cpp.Llama(
        settings.model,
        n_ctx=MAX_MODEL_LEN,
        n_batch=2048,
        n_ubatch=512,
        n_threads=settings.num_threads,
        n_threads_batch=settings.num_threads,
        flash_attn=settings.is_prefill,  # with it prompts are 15% faster, decoding 5% slower
        verbose=False,
    )
    sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_temp(TEMPERATURE))
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_dist(0))

    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        (prompt,), (output_len,) = prompts, output_lens
        llm.reset()
        llm.eval(prompt)
        ids = [llama_cpp.llama_sampler_sample(sampler, llm.ctx, -1)]
        while len(ids) < output_len:
            llm.eval(ids[-1:])
            ids.append(llama_cpp.llama_sampler_sample(sampler, llm.ctx, -1))
        return [ids]

    return Loaded(generate, llm.context_params.n_threads, ("llama_cpp",))


def load_transformers(settings: Settings) -> Loaded:
    """One batch, prompts padded on the left, as many new tokens for all as the longest needs."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=dtype, attn_implementation="sdpa"
    )
    model.eval()

    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left: all prompts end together
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        outputs = model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=max(output_lens),
            max_new_tokens=max(output_lens),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,  # all tokens, as in the others; the default keeps 50
            top_p=1.0,
            pad_token_id=0,
        )
        new_ids = outputs[:, longest:].tolist()
        return [row[:n] for row, n in zip(new_ids, output_lens, strict=True)]

    return Loaded(generate, torch.get_num_threads(), ("transformers", "torch"))


LOADERS = {
    "nanoinfer": load_nanoinfer,
    "vllm": load_vllm,
    "llama_cpp": load_llama_cpp,
    "transformers": load_transformers,
}


def find_version(module: str) -> str:
    with contextlib.suppress(AttributeError):
        return sys.modules[module].__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(module)
    return "(source tree)"


def serve(settings: Settings) -> None:
    """Answer requests from stdin until it is closed."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded = LOADERS[settings.engine](settings)
    versions = {name: find_version(name) for name in loaded.modules}
    versions["python"] = platform.python_version()
    about = {"versions": versions, "num_threads": loaded.num_threads}
    print(json.dumps(about), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        outputs = loaded.generate(request["prompts"], request["output_lens"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "outputs": outputs}), file=replies, flush=True)


if __name__ == "__main__":
    serve(Settings(**json.loads(sys.argv[1])))
