"""mrl: all commands around a run except its submission. Each is a module here, loaded when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module

import click

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Before a run": {
        "data": ("Choose problems by the pass rates of a policy.", "filter"),
        "doctor": ("Check a recipe on a cluster before it runs.", ""),
        "environments": ("List the registered environments, or try one.", ""),
        "plan": (
            "Show the ranks on each node, the memory they need, and how long steps take.",
            "dry-run estimate simulate",
        ),
        "prefetch": ("Fetch the image, model and data of a recipe into the cluster's cache.", "download fetch pull"),
        "rehearse": ("Run a step at its true size without a GPU: shapes, devices, memory.", ""),
        "rows": (
            "Show rows of data, prompts and rewards as they are trained.",
            "dataset examples inspect preview",
        ),
    },
    "A run": {
        "status": ("Show the state of a run and what it waits for.", "info list ps runs show squeue state"),
        "logs": ("Print or follow a log of a run.", "log output tail"),
        "cancel": (
            "End a run, after a save or at once, or make it queue again.",
            "abort delete end kill rm scancel stop",
        ),
        "resume": ("Resume a run that has ended.", "continue restart"),
        "fork": ("Start a new run from a checkpoint of another.", ""),
        "attach": ("Open a shell next to the ranks of a run.", "exec shell ssh"),
    },
    "What it learns": {
        "report": (
            "Write one HTML page of a run, or compare several runs.",
            "dashboard diff html page sweep versus view vs",
        ),
        "explain": ("Say why a run does not learn, with evidence and what to try.", "debug diagnose why"),
        "rollouts": (
            "Show prompts and answers of a run, with their rewards.",
            "answers completions generations samples",
        ),
        "replay": ("Answer a recorded prompt again, and score it by today's code.", "again repeat reproduce rescore"),
    },
    "Its weights": {
        "evaluate": ("Score a checkpoint on an environment's problems.", "benchmark eval score test"),
        "chat": ("Talk to a policy in the terminal.", "generate talk"),
        "serve": ("Serve a policy over HTTP with OpenAI's API, or an environment.", ""),
        "convert": ("Convert weights from and to Hugging Face's format.", "export"),
        "push": ("Upload weights to the Hugging Face hub, with a model card.", "hub publish release upload"),
    },
    "Reference": {
        "help": ("Describe a command, a key of a recipe, or a metric.", ""),
    },
}
"""Heading -> modules of launcher.cli that hold a click command named `command` -> its short help, which the list of
commands shows without importing them, and its names in other programs."""
COMMANDS = {name: words for group in GROUPS.values() for name, (_, words) in group.items()}
SHORT_HELP = {name: short for group in GROUPS.values() for name, (short, _) in group.items()}
ALIASES: Mapping[str, tuple[str, ...]] = {
    "compare": ("report",),
    "ls": ("status", "--list"),
    "recipes": ("help", "--recipes"),
    "requeue": ("cancel", "--requeue"),
    "serve-agent": ("serve", "--environment"),
}
"""Short name -> the words that it stands for. No list shows them; the help of the option names them."""
EXAMPLES = {
    "attach": "mrl attach demo-run --rank 3 -- nvidia-smi",
    "cancel": "mrl cancel demo-run --drain",
    "chat": "mrl chat runs/mine",
    "convert": "mrl convert megatron-to-hf runs/mine mine-hf",
    "data": "mrl data filter evaluations/mine.json --out kept.jsonl",
    "doctor": "mrl doctor qwen2.5-32b-dapo --cluster mine --deep",
    "environments": "mrl environments try gsm8k -n 2",
    "evaluate": "mrl evaluate runs/mine --env gsm8k",
    "explain": "mrl explain runs/mine",
    "fork": "mrl fork runs/mine@400 grpo.kl_beta=0.001",
    "help": "mrl help grpo.policy_loss",
    "logs": "mrl logs runs/mine -f --rank 3",
    "plan": "mrl plan qwen2.5-32b-dapo job.nodes=16",
    "prefetch": "mrl prefetch qwen2.5-32b-dapo --cluster mine",
    "push": "mrl push runs/mine me/my-model --private",
    "rehearse": "mrl rehearse qwen2.5-32b-dapo job.nodes=4",
    "rows": "mrl rows my.yaml -n 4",
    "replay": "mrl replay runs/mine 120 3841",
    "report": "mrl report runs/mine --open",
    "resume": "mrl resume runs/mine training.steps=1200",
    "rollouts": "mrl rollouts runs/mine --step 120 --reward 0",
    "serve": "mrl serve runs/mine --port 8000",
    "status": "mrl status runs/mine --watch",
}
START = "mrl-submit starts a run"
COMPLETION = 'click completes: eval "$(_MRL_COMPLETE=bash_source mrl)"; zsh_source and fish_source for other shells'
SUBMIT_SYNONYMS = "grpo launch new rl run sbatch start submit train"


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, SHORT_HELP[name]) for name in names])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from launcher.documents import documents

        if folder := documents():
            formatter.write_paragraph()
            formatter.write_text("Files of docs/ and containers/ that messages name are in")
            formatter.write(f"  {folder}\n")  # never wrapped, so that it can be copied

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"launcher.cli.{name}").command
        command.short_help = SHORT_HELP[name]
        command.epilog = f"\b\nExample:\n  {EXAMPLES[name]}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if words := ALIASES.get(args[0]):
            asks_for_help = bool({*args[1:]} & {"-h", "--help"})  # which the option would take as its value
            args = [*words[: 1 if asks_for_help else None], *args[1:]]
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"mrl has no command {args[0]!r}; {_hint(args[0])}", ctx)
        return super().resolve_command(ctx, args)


def _hint(word: str) -> str:
    if word in SUBMIT_SYNONYMS.split() or "submit".startswith(word[:3]):
        return START
    if word == "completion":
        return COMPLETION
    meant = [name for name, words in COMMANDS.items() if word in words.split()]
    if close := meant or get_close_matches(word, COMMANDS, n=1):
        return f"did you mean {close[0]}?"
    return f"the commands are {', '.join(sorted(COMMANDS))}; {START}"


@click.command(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="mrl", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """GRPO post-training of Megatron models: watch, control and evaluate runs. `mrl-submit` starts them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
