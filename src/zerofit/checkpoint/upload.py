"""--upload_to: copy finished checkpoints and final/ to object storage, and fetch the newest one from there."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from transformers import TrainerCallback

from zerofit.base.errors import UserError, first_line
from zerofit.checkpoint import next_settings
from zerofit.checkpoint.facts import ASIDE, FACTS
from zerofit.job import run_folder, stretches

LINKED = ".uploading"  # folder in the run folder with hard links to what is uploaded: older checkpoints are deleted

TELL_SECONDS = 60  # between lines about an upload for which the end of a run waits

RUN = "run.json"  # says whose place it is, so it is uploaded first

OF_RUN = ("*.json", "*.jsonl", "*.md", "*.html", "*.png")  # small files of the run folder, uploaded too


class Place:
    """A folder of an fsspec file system: s3://bucket/run, gs://..., file:///disk/run."""

    def __init__(self, url: str):
        """Open it. Raises: UserError for an unknown protocol or a missing package."""
        import fsspec.implementations.local

        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"--upload_to {url}: cannot be opened: {first_line(error)}.") from None
        if isinstance(self.files, fsspec.implementations.local.LocalFileSystem):
            self.files.auto_mkdir = True  # as object stores do
        self.url = url.rstrip("/")

    def steps(self) -> dict[int, str]:
        """Return {step: path} of the checkpoints there that are whole; zerofit.json is uploaded last."""
        self.files.invalidate_cache()
        found = self.files.glob(f"{self.root}/checkpoint-*/{FACTS}")
        steps = {Path(file).parent.name.rpartition("-")[2]: str(Path(file).parent) for file in found}
        return {int(step): steps[step] for step in steps if step.isdecimal()}

    def put(self, folder: Path, name: str) -> None:
        """Copy a folder to `name`, replacing what is there, unless it is the same checkpoint."""
        facts = f"{self.root}/{name}/{FACTS}"
        is_checkpoint = (folder / FACTS).exists()
        if is_checkpoint and self.files.exists(facts) and self.files.cat_file(facts) == (folder / FACTS).read_bytes():
            return
        if self.files.exists(f"{self.root}/{name}"):
            self.files.rm(f"{self.root}/{name}", recursive=True)
        for file in sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.name == FACTS):
            self.files.put_file(str(file), f"{self.root}/{name}/{file.relative_to(folder)}")

    def holds_run(self) -> bool:
        """Return whether a checkpoint or a final/ is there."""
        return bool(self.steps()) or self.files.exists(f"{self.root}/final")

    def is_of(self, run: Path) -> bool:
        """Return whether the run.json there is that of a run folder: one command began both, at one time."""
        try:
            there = json.loads(self.files.cat_file(f"{self.root}/{RUN}"))
        except (FileNotFoundError, ValueError, RecursionError):
            there = {}
        facts = (there if isinstance(there, dict) else {}, run_folder.read_json(run / RUN))
        ours, theirs = (stretches.of_run(one)[0] for one in facts)
        return all(ours.get(name) == theirs.get(name) for name in ("started", "command"))

    def claim(self, run: Path) -> None:
        """Put the run.json of a run there. Raises: FileExistsError if another run is there."""
        if self.files.exists(f"{self.root}/{RUN}") and not self.is_of(run) and self.holds_run():
            raise FileExistsError("another run uploads there, or has; name another place with --upload_to")
        if (run / RUN).exists():
            self.files.put_file(str(run / RUN), f"{self.root}/{RUN}")

    def put_small_files(self, run: Path) -> None:
        """Copy the records of a run: metrics.jsonl, run.json and the like."""
        for file in (file for pattern in OF_RUN for file in run.glob(pattern)):
            self.files.put_file(str(file), f"{self.root}/{file.name}")

    def prune(self, run: Path) -> None:
        """Delete the checkpoints there that the run folder no longer has, once its newest one is there."""
        kept, there = run_folder.checkpoints(run), self.steps()
        for step in there.keys() - kept.keys() if kept and max(kept) in there else ():
            self.files.rm(there[step], recursive=True)

    def get(self, path: str, folder: Path) -> None:
        """Copy what lies under a path into a folder. Raises: UserError for a name that would leave it."""
        for file in self.files.find(path):
            target = folder / os.path.relpath(file, path)
            if not target.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{self.url}: {file}: would be written outside of the folder.")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(file, str(target))


def fetch(settings) -> None:
    """Copy the newest checkpoint of --upload_to into a run folder that has none, for --resume_from_checkpoint auto.

    Raises: UserError for a place that cannot be read, or that holds a run which this one does not resume.
    """
    if not settings.upload_to:
        return
    if settings.node_local_storage:
        raise UserError("--upload_to: rank 0 uploads, but with --node_local_storage each node has a part; drop one.")
    place, run = Place(settings.upload_to), run_folder.name_folder(settings)
    how = str(settings.resume_from_checkpoint or "false").lower()
    try:
        steps = place.steps()
        if how == "false" and (place.holds_run() or place.files.exists(f"{place.root}/{RUN}")):
            raise UserError(
                f"--upload_to {place.url}: already holds a run; name another place, or continue with "
                "--resume_from_checkpoint auto."
            )
        if not place.holds_run():
            return
        if how not in next_settings.NEWEST or not steps or run_folder.checkpoints(run):
            if not place.is_of(run):
                raise UserError(f"--upload_to {place.url}: holds another run than {run}; name another place.")
            return
        name = f"checkpoint-{max(steps)}"
        print(f"note: {run} holds no checkpoint: {name} is fetched from {place.url}", flush=True)
        shutil.rmtree(run / ASIDE, ignore_errors=True)
        place.get(steps[max(steps)], run / ASIDE / name)
        for record in (run_folder.METRICS, RUN):
            if place.files.exists(there := f"{place.root}/{record}"):
                place.files.get_file(there, str(run / record))
        (run / ASIDE / name).rename(run / name)
        (run / ASIDE).rmdir()
    except UserError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise UserError(f"--upload_to {place.url}: cannot be read: {type(error).__name__}: {error}.") from None


class Uploads(TrainerCallback):
    """Upload each saved checkpoint in a thread of rank 0, while training continues.

    A failure is reported, and retried at the next save if the folder still exists.
    """

    def __init__(self, url: str, run: Path):
        self.place, self.run = Place(url), run
        self.names = set()  # checkpoints that are not uploaded yet
        self.thread = ThreadPoolExecutor(1, "zerofit-upload")

    def on_save(self, args, state, control, **kwargs):
        if args.process_index == 0:
            self.names.add(f"checkpoint-{state.global_step}")
            links = self.run / LINKED / str(state.global_step)
            folders = [self.run / name for name in sorted(self.names) if (self.run / name).is_dir()]
            self.thread.submit(self._upload, [_linked(folder, links) for folder in folders], links)

    def finish(self, *more: Path) -> None:
        """Wait until everything is uploaded, also further folders and the records of the run."""
        left = [self.run / name for name in sorted(self.names) if (self.run / name).is_dir()]
        last = self.thread.submit(self._upload, [*left, *more], self.run / LINKED)
        while not wait([last], timeout=TELL_SECONDS).done:
            print(f"note: trained; waiting for the upload to {self.place.url}", flush=True)
        self.thread.shutdown()

    def _upload(self, folders: list[Path], links: Path) -> None:
        name = folders[0].name if folders else "its records"
        try:
            self.place.claim(self.run)
            for folder in folders:
                name = folder.name
                self.place.put(folder, name)
                self.names.discard(name)
            name = "its records"
            self.place.put_small_files(self.run)
            self.place.prune(self.run)
        except Exception as error:  # each file system has errors of its own; training continues
            print(f"WARNING: {self.place.url}: {name} was not uploaded ({type(error).__name__}: {error}); the next "
                  "save retries it", flush=True)  # fmt: skip
        shutil.rmtree(links, ignore_errors=True)


def _linked(folder: Path, links: Path) -> Path:
    """Return a copy of a folder by hard links, which outlasts it; the folder itself where the disk has none."""
    try:
        return Path(shutil.copytree(folder, links / folder.name, copy_function=os.link))
    except OSError:
        return folder
