"""A first look at nanoinfer: one story as it is written, two questions answered together.

python example.py            # a small demo model; downloads 93 MB once
python example.py MODEL      # a folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B
"""

import sys

from nanoinfer import LLM, SamplingParams
from nanoinfer.demo import demo_model

STORY = "Once upon a time"
QUESTIONS = ["What is the capital of France?", "Which animal says meow?"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model()
    greedy = SamplingParams(temperature=0, max_tokens=64)
    with LLM(model) as llm:
        # Every item holds only what is new since the last one.
        print(STORY, end="", flush=True)
        for item in llm.stream(STORY, greedy):
            print(item.outputs[0].text, end="", flush=True)
        print(" ...")

        # A list of conversations is one batch; the answers come in the order of the questions.
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(conversations, greedy, use_tqdm=False)
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"\nQ: {question}\nA: {answer.outputs[0].text.strip()}")

        stats = llm.stats()
        print(
            f"\n{stats.steps} steps on {stats.kernels} kernels, {stats.prefix_hit_tokens} prompt "
            f"tokens reused, {stats.preemptions} preemptions"
        )


if __name__ == "__main__":
    main()
