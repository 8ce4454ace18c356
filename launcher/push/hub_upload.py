"""Upload of a folder to a model repository of the Hugging Face hub, as a separate process of `mrl push`:

    python -m launcher.push.hub_upload check REPO --private no --revision main
    python -m launcher.push.hub_upload upload REPO --revision main --folder FOLDER --message TEXT

Prints its result, or {error}, as one JSON object on stdout, and progress on stderr. The library is slow to import and
an optional extra, so the launcher does not import this module.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import BadInput
from launcher.push.card import MARK
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_USAGE
from megatron_rl.recipe.extras import install_command

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
MAIN = "main"
STALE = ["model*.safetensors", "model.safetensors.index.json", "adapter*.safetensors"]
"""Files of an earlier push that would be a second set of weights beside those of this one."""
OTHER_TYPES = {"dataset": "a data set", "space": "a Space"}


def check(repo: str, private: bool, revision: str) -> dict[str, Any]:
    """Create the repository and branch if they do not exist, and check the right to write to it.

    Raises:
        BadInput: nothing may be uploaded there.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        raise BadInput("the hub needs a token: export HF_TOKEN, or run `hf auth login`")
    api = HfApi()
    exists = "/" in repo and api.repo_exists(repo)
    for kind, called in OTHER_TYPES.items() if "/" in repo and not exists else ():
        if api.repo_exists(repo, repo_type=kind):
            raise BadInput(f"{repo} is {called} of the hub, and mrl push uploads models: give another name")
    repo = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
    if private and not api.repo_info(repo).private:
        raise BadInput(f"--private: {repo} exists and is public: make it private on the hub, or give another name")
    if revision != MAIN:
        api.create_branch(repo, branch=revision, exist_ok=True)
    # Asks how to upload a file, which needs the right to write; a small text file is then not uploaded.
    api.preupload_lfs_files(repo, [CommitOperationAdd(CARD, MARK.encode())], revision=revision)
    return {"repo": repo, "created": not exists}


def upload(repo: str, revision: str, folder: Path, message: str) -> dict[str, Any]:
    """Upload what the repository lacks in one commit. A card without the mark of mrl stays."""
    from huggingface_hub import HfApi

    api = HfApi()
    before = api.repo_info(repo, revision=revision).sha
    theirs = _has_own_card(api, repo, revision)
    # Files that the hub has already are not sent again, whether a commit or an interrupted push brought them there.
    done = api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        revision=revision,
        commit_message=message,
        ignore_patterns=[CARD] if theirs else None,
        delete_patterns=STALE,
    )
    return {"url": done.commit_url, "commit": done.oid, "changed": done.oid != before, "card_kept": theirs}


def _has_own_card(api: HfApi, repo: str, revision: str) -> bool:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        text = Path(api.hf_hub_download(repo, CARD, revision=revision)).read_text(encoding="utf-8", errors="replace")
    except LocalEntryNotFoundError:  # the hub did not answer
        raise
    except EntryNotFoundError:
        return False
    return MARK not in text


def explain(repo: str, error: Exception) -> str:
    """Explain an exception in one line. Pure."""
    names = {cls.__name__ for cls in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "HFValidationError" in names:
        return f"{repo} cannot be the name of a repository: give one such as me/my-model"
    if status == 401:
        return f"the hub does not accept your token (HF_TOKEN, or that of `hf auth login`) for {repo}"
    if status == 403:
        return (
            f"your token may not write to {repo}: it needs the right to write, and you must be a member of "
            f"{repo.partition('/')[0]} (https://huggingface.co/settings/tokens)"
        )
    reasons = [str(one).strip().partition("\n")[0] for one in (error, error.__cause__) if one is not None]
    reason = " ".join(filter(None, reasons)) or type(error).__name__
    return f"{repo}: {reason}; the same command continues where this one stopped"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.push.hub_upload", description="Upload to the hub.")
    parser.add_argument("what", choices=["check", "upload"])
    parser.add_argument("repo")
    parser.add_argument("--revision", required=True)
    parser.add_argument("--private", choices=["yes", "no"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--message")
    options = parser.parse_args(arguments)
    try:
        done, code = _carry_out(options), EXIT_FINISHED
    except BadInput as refused:
        done, code = {"error": str(refused)}, EXIT_USAGE
    except ImportError as error:
        done, code = {"error": f"uploading to the hub needs `{install_command('prefetch')}`: {error}"}, EXIT_USAGE
    except Exception as error:  # noqa: BLE001 - the library raises many kinds
        refused_by_hub = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        usage = refused_by_hub or isinstance(error, ValueError)
        done, code = {"error": explain(options.repo, error)}, EXIT_USAGE if usage else EXIT_CRASHED
    sys.stdout.write(json.dumps(done) + "\n")
    return code


def _carry_out(options: argparse.Namespace) -> dict[str, Any]:
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    if options.what == "check":
        return check(options.repo, options.private == "yes", options.revision)
    return upload(options.repo, options.revision, options.folder, options.message)


if __name__ == "__main__":
    sys.exit(main())
