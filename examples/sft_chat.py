"""Writes a small data set of chats for examples/sft_chat.sh: our own text, made by a seed, one JSON object per line.

python examples/sft_chat.py chats.jsonl [NUMBER]

Each chat is a system message and 1 to 16 questions with answers about sums and prices; most are short, a few are long,
as in instruction data. Prints how many there are and how long.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_CHATS = 400
THINGS = ("apple", "book", "chair", "drum", "envelope", "flute", "globe", "hammer")


def chat(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of one chat."""
    messages = [{"role": "system", "content": "You answer questions about sums and prices in one sentence."}]
    num_turns = min(16, 1 + int(rng.paretovariate(1.2)))
    for _ in range(num_turns):
        if rng.random() < 0.5:
            a, b = rng.randrange(10), rng.randrange(10)
            question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        else:
            thing, price = rng.choice(THINGS), rng.randrange(1, 10)
            question = f"One {thing} costs {price}. What do two of them cost?"
            answer = f"Two of them cost {2 * price}."
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def lines(number: int = NUM_CHATS, seed: int = 1) -> list[str]:
    """Return the lines of the file: the same for the same seed."""
    rng = random.Random(seed)
    return [json.dumps({"messages": chat(rng)}) for _ in range(number)]


def main(path: str, number: str = str(NUM_CHATS)) -> None:
    """Write the file."""
    made = lines(int(number))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{line}\n" for line in made), encoding="utf-8")
    sizes = sorted(map(len, made))
    print(f"{path}: {len(made)} chats of {sizes[0]} to {sizes[-1]} bytes, half of them below {sizes[len(sizes) // 2]}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
