"""Text from a plan: python generate.py model.atsplan "Once upon a time"."""

import sys

import atsc


def main(path: str, prompt: str) -> None:
    with atsc.load(path) as plan:
        text = plan.tokenizer.stream()
        ids = plan.tokenizer.encode(prompt)
        for token in plan.generate(ids, max_new_tokens=64, temperature=0.7, top_p=0.9, seed=0):
            print(text.push(token), end="", flush=True)
        print(text.flush())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} PLAN PROMPT")
    try:
        main(*sys.argv[1:])
    except atsc.AtscError as error:
        sys.exit(str(error))
