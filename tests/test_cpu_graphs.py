"""Recorded decoding steps: the same bits as the layers, in whatever order batches come."""

import ctypes

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.kernels import select_kernels
from nanoinfer.kernels.record import Recorder
from nanoinfer.models.qwen3 import Decoder

CPU = torch.device("cpu")
has_kernels = select_kernels(CPU, "auto", False).recorder is not None
pytestmark = pytest.mark.skipif(not has_kernels, reason="no C++ kernels here")
has_bf16 = torch.backends.mkldnn.is_available() and bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
FORMS = [
    pytest.param(
        {"dtype": "bfloat16"}, marks=pytest.mark.skipif(not has_bf16, reason="no bf16"), id="bf16"
    ),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, id="int8"),
    pytest.param({"dtype": "float32", "quantization": "int8"}, id="int8-fp32"),
]


def run(folder, **options) -> tuple[list, list[int]]:
    """Greedy answers whose batch shrinks from 7 to 1 while contexts grow over blocks."""
    with LLM(folder, skip_tokenizer_init=True, block_size=4, **options) as llm:
        prompts = [list(range(3 + i, 12 + 2 * i)) for i in range(7)]
        params = [
            SamplingParams(temperature=i % 2, seed=i, max_tokens=4 + 3 * i, ignore_eos=True)
            for i in range(7)
        ]
        first = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts[::-1], params[::-1], use_tqdm=False)
        graphs = llm.engine._pipeline.runner._graphs
        recorded = [] if graphs is None else list(graphs._recordings)
    return [o.outputs[0].token_ids for o in first + again], recorded


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize(
    "model",
    ["tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-qwen3_5-positions", "tiny-qwen3-moe"],
)
def test_replayed_steps_give_the_tokens_of_the_layers(tiny, model, options):
    folder = tiny(model)
    if "moe" in model and "quantization" in options:
        pytest.skip("experts are not quantised")
    replayed, recorded = run(folder, **options)
    by_layer, nothing = run(folder, enforce_eager=True, **options)
    assert replayed == by_layer
    assert set(recorded) >= {1, 2, 3}
    assert nothing == []


def test_float32_is_run_layer_by_layer(tiny_qwen3):
    """F.linear is no kernel of ours: its part of a step would be left out."""
    tokens, recorded = run(tiny_qwen3, dtype="float32")
    assert recorded == []
    assert tokens == run(tiny_qwen3, dtype="float32", enforce_eager=True)[0]


def test_hidden_states_are_the_same_bits(tiny_qwen3):
    """Of a batch that a recording has not seen, after others have used its buffers."""
    with LLM(tiny_qwen3, dtype="bfloat16", quantization="int8", skip_tokenizer_init=True) as llm:
        runner = llm.engine._pipeline.runner
        found = []

        def forward(batch):
            if not runner._graphs.can_run(batch):
                return runner._model(batch, runner._caches), batch.logits_indices
            by_layer = runner._model(batch, runner._caches).clone()
            replayed = runner._graphs.run(batch)
            found.append(torch.equal(by_layer, replayed))
            return replayed, batch.logits_indices

        runner._forward = forward
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.generate([[5, 6, 7], [8] * 30], params, use_tqdm=False)
    assert found == [True] * 19


def test_an_operator_that_computes_cannot_be_recorded():
    recorder = Recorder(ctypes.CDLL(None))
    x = torch.ones(3)
    with recorder.record():
        assert x.view(3, 1).shape == (3, 1)
    with pytest.raises(RuntimeError, match="add"), recorder.record():
        x + x
    assert recorder.tape is None, "a failed recording ends, too"


def test_buffers_are_shared_by_every_other_layer():
    recorder = Recorder(ctypes.CDLL(None))
    with recorder.record() as tape:
        addresses = []
        for layer in range(4):
            tape.start_layer(layer)
            addresses.append([torch.empty(16).data_ptr(), torch.empty(16).data_ptr()])
    assert addresses[:2] == addresses[2:]
    assert len({*addresses[0], *addresses[1]}) == 4


def test_a_replay_calls_with_the_recorded_arguments():
    recorder = Recorder(ctypes.CDLL(None))
    recorder.abs.argtypes, recorder.abs.restype = [ctypes.c_int], None
    seen = []
    with recorder.record() as tape:
        recorder.abs(-5)
    ((_, (argument,)),) = tape.calls
    assert isinstance(argument, ctypes.c_int)
    assert argument.value == -5
    tape.calls[0] = (lambda value: seen.append(value.value), (argument,))
    tape.replay()
    assert seen == [-5]
    tape.calls[0] = (lambda value: 3, (argument,))
    with pytest.raises(RuntimeError, match="entry 3 of the batch"):
        tape.replay()


def test_a_step_that_cannot_be_recorded_is_done_once(tiny):
    """A state is changed in place: what runs twice fades twice. Here a later layer cannot be."""
    folder, options = tiny("tiny-qwen3_5-positions"), FORMS[1].values[0]
    expected, _ = run(folder, enforce_eager=True, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoinfer.models.qwen3.Decoder.forward", _with_an_operator)
        found, recorded = run(folder, **options)
    assert recorded == []
    assert found == expected


forward = Decoder.forward


def _with_an_operator(self, hidden, *args, **kwargs):
    return forward(self, hidden, *args, **kwargs) + 0
