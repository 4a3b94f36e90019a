"""omlxctl's list of commands: in sections, in the order a person meets them, and what others' tools call the same thing."""

from collections.abc import Sequence

import click

ELSEWHERE = {
    "list": "models",
    "ls": "models",
    "show": "models show MODEL",
    "add": "models add DIR",
    "pull": "models add DIR, for one that was downloaded; or: omlxctl models import FILE.gguf",
    "get": "models add DIR, for one that was downloaded; or: omlxctl models import FILE.gguf",
    "import": "models import FILE.gguf",
    "create": "models import FILE.gguf",
    "rm": "models rm MODEL",
    "remove": "models rm MODEL",
    "start": "serve; in the background: omlxctl service install",
    "server": "serve; in the background: omlxctl service install",
    "log": "logs NAME",
    "version": "--version",
}
"""The words of Ollama, of LM Studio's lms and of the habit, and what to type here."""


class Sections(click.Group):
    """A group whose help lists its commands under headings."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]  # click's own parameters, passed on
        self._sections: list[tuple[str, list[str]]] = []

    def add_section(self, heading: str, commands: Sequence[click.Command]) -> None:
        for command in commands:
            self.add_command(command)
        self._sections.append((heading, [str(command.name) for command in commands]))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for _, names in self._sections for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        limit = formatter.width - 6 - width
        for heading, names in self._sections:
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.commands and (here := ELSEWHERE.get(args[0])):
            ctx.fail(f"There is no command {args[0]}; it is: omlxctl {here}")
        return super().resolve_command(ctx, args)
