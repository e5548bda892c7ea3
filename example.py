"""A first look at nanoinfer: a story as it is written, then two questions answered together.

python example.py                          # a small demo model; downloads 93 MB once
python example.py --model Qwen/Qwen3-0.6B  # a hub id, a folder or a GGUF file
python example.py --prompt "A dragon"      # only this story
python example.py --trace                  # and one line a step: who ran, tokens, blocks, time
"""

import argparse
import logging
import sys
import time

from nanoinfer import LLM, SamplingParams
from nanoinfer.demo import demo_model

STORY = "Once upon a time"
QUESTIONS = ["What is the capital of France?", "Which animal says meow?"]


def main() -> None:
    parser = argparse.ArgumentParser(description="A story and two answers.")
    parser.add_argument("--model", help="folder, GGUF file or hub id (default: a demo model)")
    parser.add_argument("--prompt", help="how the story begins; then there are no questions")
    parser.add_argument("--trace", action="store_true", help="print one line for each step")
    args = parser.parse_args()
    logging.basicConfig(format="[%(name)s] %(message)s", stream=sys.stderr)
    logging.getLogger("nanoinfer").setLevel(logging.DEBUG if args.trace else logging.INFO)

    story, questions = (args.prompt, []) if args.prompt else (STORY, QUESTIONS)
    greedy = SamplingParams(temperature=0, max_tokens=64)
    start, num_tokens = time.perf_counter(), 0
    with LLM(args.model or demo_model()) as llm:
        print(f"ready after {time.perf_counter() - start:.1f} s\n\n{story}", end="", flush=True)
        start = time.perf_counter()
        # Every item holds only what is new since the last one.
        for item in llm.stream(story, greedy):
            print(item.outputs[0].text, end="\n" if args.trace else "", flush=True)
            num_tokens += len(item.outputs[0].token_ids)
        print(" ...")

        # A list of conversations is one batch; the answers come in the order of the questions.
        conversations = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(conversations, greedy, use_tqdm=False)
        for question, answer in zip(questions, answers, strict=True):
            print(f"\nQ: {question}\nA: {answer.outputs[0].text.strip()}")
            num_tokens += len(answer.outputs[0].token_ids)

        seconds, stats = time.perf_counter() - start, llm.stats()
        print(
            f"\n{num_tokens} tokens at {num_tokens / seconds:.0f} tok/s in {stats.steps} steps "
            f"on {stats.kernels} kernels; {stats.prefix_hit_tokens} prompt tokens reused"
        )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
