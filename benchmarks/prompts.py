"""Prompts that no server has seen before: long ones of a known length, and short ones with a long answer."""

import random
from pathlib import Path

from tokenizers import Tokenizer

WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand part
    place case week company system program question work government number night point home water room mother area money
    story fact month lot right study book eye job word business issue side kind head house service friend father power hour
    game line end member law car city community name president team minute idea body information back parent face others
    level office door health person art war history party result change morning reason research girl guy moment air teacher
""".split()  # noqa: SIM905  # a list would be a hundred lines
TASK = "\nWrite a story with the words above."


class Prompts:
    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._random = random.Random(seed)
        self.template_tokens = 0
        """What the chat template adds, found out with the first answer."""

    def learn_template(self, content: str, prompt_tokens: int) -> None:
        self.template_tokens = prompt_tokens - self._count(content)

    def story(self) -> str:
        """Some 64 tokens with a usual template."""
        a, b, c = self._random.sample(WORDS, 3)
        return f"Write a very long story of many chapters about a {a}, a {b} and a {c}. Begin with the place and the weather."

    def fresh(self, prompt_tokens: int) -> str:
        """About as long as that in tokens, template included (±2); different from its first word on."""
        wanted = prompt_tokens - self.template_tokens - self._count(TASK)
        words = self._random.choices(WORDS, k=max(4, wanted))
        words[0] = f"{self._random.getrandbits(32):x}"
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids[: max(1, wanted)]
        return self._tokenizer.decode(ids) + TASK

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
