"""Writes a small data set of prompts with 4 responses each for examples/several_responses.sh: our own text, by a seed.

python examples/several_responses.py FOLDER [NUMBER]

A prompt is a list of prices and a question about one of them, 300 to 1700 bytes; a response is a sentence. The same
responses stand in two files: FOLDER/together.jsonl has one line for each prompt, with all of its responses,
FOLDER/apart.jsonl one line for each response. Prints how many bytes that is.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_PROMPTS = 192
THINGS = ("apple", "book", "chair", "drum", "envelope", "flute", "globe", "hammer")
COLOURS = ("red", "green", "blue", "white", "black", "brown")


def question(rng: random.Random) -> tuple[str, list[str]]:
    """Return a prompt and 4 responses to it."""
    prices = [(f"{rng.choice(COLOURS)} {rng.choice(THINGS)}", rng.randrange(2, 50)) for _ in range(rng.randint(12, 80))]
    thing, price = rng.choice(prices)
    listed = "; ".join(f"{name}: {cost} coins" for name, cost in prices)
    return f"Prices. {listed}. What does the {thing} cost?", [
        f"The {thing} costs {price} coins.",
        f"It costs {price} coins, as the list says.",
        f"{price} coins.",
        f"For the {thing} you pay {price} coins, for two of them {2 * price}.",
    ]


def lines(number: int = NUM_PROMPTS, seed: int = 1) -> tuple[list[str], list[str]]:
    """Return the lines of both files: the same for the same seed."""
    rng = random.Random(seed)
    made = [question(rng) for _ in range(number)]
    together = [json.dumps({"prompt": prompt, "responses": responses}) for prompt, responses in made]
    apart = [json.dumps({"prompt": prompt, "responses": [one]}) for prompt, responses in made for one in responses]
    return together, apart


def main(folder: str, number: str = str(NUM_PROMPTS)) -> None:
    """Write the files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, made in zip(("together", "apart"), lines(int(number)), strict=True):
        path = Path(folder) / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in made), encoding="utf-8")
        print(f"{path}: {len(made)} lines, {path.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
