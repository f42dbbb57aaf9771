"""``mxquant completion``."""

from __future__ import annotations

import click

from mxquant.cli.common import handle_errors

_EPILOG = """\b
To install it for all new shells:
  bash  mxquant completion bash > ~/.local/share/bash-completion/completions/mxquant
  zsh   mxquant completion zsh > ~/.zfunc/_mxquant    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish  mxquant completion fish > ~/.config/fish/completions/mxquant.fish

\b
To enable it in the current shell:
  eval "$(mxquant completion bash)"
"""


@click.command("completion", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@handle_errors
def completion_command(shell: str) -> None:
    """Print the completion script of a shell, for commands, options, their choices, and paths."""
    from click.shell_completion import get_completion_class

    from mxquant.cli.main import main

    kind = get_completion_class(shell)
    assert kind is not None
    # Not kind.source(): it runs a shell to learn its version, and needs none to print this.
    completion = kind(main, {}, "mxquant", "_MXQUANT_COMPLETE")
    click.echo(completion.source_template % completion.source_vars())
