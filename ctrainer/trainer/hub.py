"""Trainer: the Hub: the repository, the model card, and what is uploaded when.

Functions that Trainer has as methods, and what these share. Uploads are
huggingface_hub's; with hub_strategy other than "end" they run behind the training, and
the run ends when the last of them is done.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctrainer import integrations
from ctrainer.checkpoint import PREFIX, Sink
from ctrainer.checkpoint.disk import replacing
from ctrainer.runtime import messages

if TYPE_CHECKING:
    from ctrainer.trainer import Trainer

logger = logging.getLogger("ctrainer.trainer")

_LEFT_OUT = ["_*", f"{PREFIX}-*", ".*"]
_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_INDEX = "model.safetensors.index.json"


def _hub(what: str, instead: str, call: str, **kwargs: Any) -> Any:
    """Call a function of huggingface_hub; an error names what was tried, and what to
    do instead."""
    import huggingface_hub

    try:
        return getattr(huggingface_hub, call)(**kwargs)
    except Exception as error:  # of HTTP, of the Hub, of files
        raise RuntimeError(
            f"push_to_hub: {what} failed ({type(error).__name__}: {error}). Log in "
            f"(hf auth login, or hub_token), look at the network, or {instead}"
        ) from error


def init_hf_repo(trainer: Trainer, token: str | None = None) -> None:
    """Make the repository on the Hub, on the first rank, and set hub_model_id to its
    full name.

    It is args.hub_model_id or else has the name of output_dir.

    Args:
        token (str | None, default None): For logging in; None: hub_token.

    Raises:
        RuntimeError: the Hub rejects it or cannot be reached.
    """
    if not trainer.is_world_process_zero():
        return
    args = trainer.args
    repo = getattr(args, "hub_model_id", None) or Path(args.output_dir).absolute().name
    url = _hub(
        f"making the repository {repo!r}",
        "set push_to_hub=False and call trainer.push_to_hub() when the Hub is there",
        "create_repo", repo_id=repo, token=_token(trainer, token), exist_ok=True,
        private=getattr(args, "hub_private_repo", None),
    )  # fmt: skip
    trainer.hub_model_id = url.repo_id
    trainer.push_in_progress = None


def create_model_card(
    trainer: Trainer,
    language: str | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
) -> None:
    """Write README.md with the run's facts into output_dir, through transformers'
    TrainingSummary. Tags of a card that is there are kept, and PEFT adds its own.

    Args:
        language, license, tags, model_name, finetuned_from, tasks, dataset_tags,
            dataset, dataset_args (str | None, default None): As in
            TrainingSummary.from_trainer.

    Raises:
        ImportError: transformers is not installed.
    """
    if not trainer.is_world_process_zero():
        return
    path = os.path.join(trainer.args.output_dir, "README.md")
    library, had = integrations.card_facts(path)
    if tags is not None and had:
        tags = [tags] if isinstance(tags, str) else list(tags)
        tags += [tag for tag in had if tag not in tags]
    card = integrations.model_card(
        trainer, language=language, license=license, tags=tags, model_name=model_name,
        finetuned_from=finetuned_from, tasks=tasks, dataset_tags=dataset_tags,
        dataset=dataset, dataset_args=dataset_args,
    )  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        file.write(card)
    if library == "peft":
        trainer.model.create_or_update_model_card(trainer.args.output_dir)


def push_to_hub(
    trainer: Trainer,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Save the model and upload output_dir, without its checkpoints, to the Hub.

    Args:
        commit_message (str | None, default 'End of training'): Of the upload.
        blocking (bool, default True): Wait for its end.
        token (str | None, default None): For logging in; None: hub_token.
        revision (str | None, default None): Branch; None: hub_revision.
        **kwargs: Of the model card.

    Returns:
        What huggingface_hub.upload_folder returns; None on ranks other than 0.

    Raises:
        ImportError: huggingface_hub is not installed.
        RuntimeError: the Hub rejects it or cannot be reached.
    """
    args = trainer.args
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer._call_hook("save_model", _internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    name = getattr(args, "hub_model_id", None) or Path(args.output_dir).name
    kwargs.setdefault("model_name", name.split("/")[-1])
    own = getattr(trainer.model, "model_tags", None)
    if own is not None:
        tags = kwargs.get("tags") or []
        tags = [tags] if isinstance(tags, str) else list(tags)
        kwargs["tags"] = tags + [tag for tag in own if tag not in tags]
    trainer.create_model_card(**kwargs)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token)
    trainer._finish_current_push()
    return _upload(
        trainer, args.output_dir, commit_message, token, blocking,
        ignore_patterns=_LEFT_OUT, revision=revision or args.hub_revision,
    )  # fmt: skip


def push_from_checkpoint(trainer: Trainer, checkpoint_folder: str) -> None:
    """Upload what was just saved, behind the training, as hub_strategy says; nothing
    while an upload is under way, unless hub_always_push is set. Hook."""
    args, state = trainer.args, trainer.state
    if not trainer.is_world_process_zero() or args.hub_strategy == "end":
        return
    uploads = trainer.push_in_progress
    busy = uploads is not None and not uploads.is_done()
    if busy and not args.hub_always_push:
        return
    trainer.callback_handler.on_push_begin(args, state, trainer.control)
    _copy_weights(checkpoint_folder, args.output_dir)
    if callable(getattr(trainer.processing_class, "save_pretrained", None)):
        trainer.processing_class.save_pretrained(args.output_dir)
    trainer._adapter.checkpoints.save_arguments(Sink(args.output_dir, None), args)
    by_steps = args.save_strategy == "steps"
    at = f"step {state.global_step}" if by_steps else f"epoch {int(state.epoch)}"
    message = f"Training in progress, {at}"
    jobs = [
        _upload(
            trainer, args.output_dir, message, None, False,
            ignore_patterns=_LEFT_OUT, revision=args.hub_revision,
        )
    ]  # fmt: skip
    if args.hub_strategy in ("checkpoint", "all_checkpoints"):
        last = args.hub_strategy == "checkpoint"
        place = "last-checkpoint" if last else Path(checkpoint_folder).name
        jobs.append(
            _upload(
                trainer, checkpoint_folder, f"{message}, checkpoint", None, False,
                path_in_repo=place, revision=args.hub_revision,
            )
        )  # fmt: skip
    if busy:
        uploads.jobs += jobs
    else:
        trainer.push_in_progress = Uploads(jobs)


def finish_current_push(trainer: Trainer) -> None:
    """Wait for the uploads that are under way; warn of those that have failed. Hook."""
    uploads, trainer.push_in_progress = trainer.push_in_progress, None
    if uploads is None:
        return
    if not uploads.is_done():
        messages.uploading()
    for error in uploads.failures():
        logger.warning(
            "push_to_hub: an upload of a checkpoint failed (%s: %s); it is whole in %s",
            type(error).__name__, error, trainer.args.output_dir,
        )  # fmt: skip


class Uploads:
    """Uploads under way: futures of huggingface_hub."""

    def __init__(self, jobs: list[Any]) -> None:
        self.jobs = jobs

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def failures(self) -> list[BaseException]:
        """The errors of those that failed; waits for all."""
        return [error for error in (job.exception() for job in self.jobs) if error]

    def wait_until_done(self) -> None:
        self.failures()


def _upload(
    trainer: Trainer, folder: str, message: str | None, token: str | None,
    blocking: bool, **options: Any,
) -> Any:  # fmt: skip
    return _hub(
        f"uploading {folder}", "call push_to_hub() later: all of it is saved there",
        "upload_folder", repo_id=trainer.hub_model_id, folder_path=folder,
        commit_message=message, token=_token(trainer, token),
        run_as_future=not blocking, **options,
    )  # fmt: skip


def _token(trainer: Trainer, token: str | None) -> str | None:
    return token or getattr(trainer.args, "hub_token", None)


def _copy_weights(checkpoint: str, folder: str) -> None:
    """Copy weights and configuration, a few files or as many as the index names."""
    names = [*_WEIGHTS, _INDEX]
    index = os.path.join(checkpoint, _INDEX)
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            names += sorted(set(json.load(file)["weight_map"].values()))
    for name in names:
        if os.path.isfile(os.path.join(checkpoint, name)):
            with replacing(os.path.join(folder, name)) as beside:  # an upload may read
                shutil.copy(os.path.join(checkpoint, name), beside)
