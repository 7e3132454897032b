"""Saving and sharing: files that are whole or not there, weights under their own names, and a model card."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from crosscurrent.files import refuse_file
from crosscurrent.models.model_card import FILE, write_model_card
from crosscurrent.models.weight_names import unwrap_names, unwrapped

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


class CheckedSaving(PreTrainedModel):
    """`save_pretrained` that leaves nothing half-written, and `push_to_hub` that uploads the same files."""

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """As in transformers, with a model card (README.md) unless there is one.

        Files are written aside and moved to their places when all are complete: if that fails, what was in the folder
        before is still there. Weights of an earlier save that would be taken for this one's are removed. What
        torch.compile and the like put into the names of weights is left out.

        Args:
            save_directory: the folder.
            is_main_process: whether this process writes.
            state_dict: weights to save in place of the model's own.
            push_to_hub: upload the files as well; `kwargs` may hold what `push_to_hub` takes.
            kwargs: max_shard_size, variant and so on, as in transformers.

        Raises:
            ValueError: `safe_serialization=False`, or a file stands where the folder should be.
        """
        if kwargs.pop("safe_serialization", True) is not True:
            raise ValueError(
                "safe_serialization=False is not supported: models are saved as .safetensors only. Leave it out."
            )
        folder = Path(save_directory)
        refuse_file(folder)
        hub = {name: kwargs.pop(name) for name in _HUB_SETTINGS if name in kwargs}
        folder.mkdir(parents=True, exist_ok=True)
        if kwargs.get("distributed_checkpoint"):  # every process writes its part, at the place itself
            super().save_pretrained(folder, is_main_process, state_dict, **kwargs)
            if is_main_process:
                write_model_card(self, folder)
            return
        if state_dict is not None or any(unwrapped(name) != name for name, _ in self.named_parameters()):
            state_dict = unwrap_names(self.state_dict() if state_dict is None else state_dict)
        with TemporaryDirectory(dir=folder, prefix=".saving-") as aside:
            super().save_pretrained(aside, is_main_process, state_dict, **kwargs)
            if is_main_process and not getattr(self, "_hf_peft_config_loaded", False):
                write_model_card(self, Path(aside), tags=_as_list(hub.get("tags")))
            written = _move(Path(aside), folder)
        if push_to_hub and is_main_process:
            upload(folder, written, repo_id=hub.pop("repo_id", None) or folder.resolve().name, **hub)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]
        """Upload what `save_pretrained` writes to the Hugging Face hub. A model card that is there already stays.

        Args:
            repo_id: the repository, OWNER/NAME; it is created if there is none.
            kwargs: commit_message, commit_description, private, token, revision, create_pr, tags and max_shard_size, as
                in transformers.

        Returns:
            what huggingface_hub tells of the commit.
        """
        hub = {name: kwargs.pop(name) for name in _HUB_SETTINGS if name in kwargs}
        with TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder, tags=hub.get("tags"), **kwargs)
            return upload(folder, [path.name for path in folder.iterdir()], repo_id=repo_id, **hub)


_HUB_SETTINGS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


def upload(
    folder: Path,
    names: Sequence[str],
    repo_id: str,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: Any = None,
) -> Any:
    """Upload some files of a folder, and its model card if the repository has none.

    Args:
        tags: are in the model card by now.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    chosen = set(names) - {FILE}
    if (folder / FILE).exists() and not api.file_exists(repo_id, FILE, revision=revision):
        chosen.add(FILE)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=sorted(chosen),
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


def _move(aside: Path, folder: Path) -> list[str]:
    """Move what was written into its folder. Returns the names of the files."""
    names = sorted(path.name for path in aside.iterdir())
    for name in names:
        if name != FILE or not (folder / FILE).exists():
            os.replace(aside / name, folder / name)
    if any(_WEIGHTS.fullmatch(name) for name in names):
        for path in folder.iterdir():  # transformers would read a model.safetensors before the parts of a later save
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
    return names


def _as_list(tags: Any) -> list[str]:
    return [tags] if isinstance(tags, str) else list(tags or ())
