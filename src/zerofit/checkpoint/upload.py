"""--upload_to: copy complete checkpoints and final/ to object storage, and download the newest checkpoint."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from transformers import TrainerCallback

from zerofit.base.errors import UserError, first_line
from zerofit.checkpoint import next_settings
from zerofit.checkpoint.facts import FACTS, STAGING
from zerofit.job import run_folder, run_segments

LINKED = ".uploading"  # folder in the run folder with hard links to the files to upload: rotation deletes checkpoints

WAIT_REPORT_SECONDS = 60  # between messages while the end of a run waits for an upload

RUN = "run.json"  # identifies the owner of the storage, so it is uploaded first

RECORD_PATTERNS = ("*.json", "*.jsonl", "*.md", "*.html", "*.png")  # small files of the run folder


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
        """Return {step: path} of the complete checkpoints there; zerofit.json is uploaded last."""
        self.files.invalidate_cache()
        files = self.files.glob(f"{self.root}/checkpoint-*/{FACTS}")
        steps = {Path(file).parent.name.rpartition("-")[2]: str(Path(file).parent) for file in files}
        return {int(step): steps[step] for step in steps if step.isdecimal()}

    def put(self, folder: Path, name: str) -> None:
        """Copy a folder to `name`, replacing its content unless it is the same checkpoint."""
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
        """Return whether the run.json there belongs to this run folder: same command and start time."""
        try:
            there = json.loads(self.files.cat_file(f"{self.root}/{RUN}"))
        except (FileNotFoundError, ValueError, RecursionError):
            there = {}
        facts = (there if isinstance(there, dict) else {}, run_folder.read_json(run / RUN))
        ours, theirs = (run_segments.all_segments(record)[0] for record in facts)
        return all(ours.get(name) == theirs.get(name) for name in ("started", "command"))

    def claim(self, run: Path) -> None:
        """Upload the run.json of a run. Raises: FileExistsError if another run uploads there."""
        if self.files.exists(f"{self.root}/{RUN}") and not self.is_of(run) and self.holds_run():
            raise FileExistsError("another run uploads or has uploaded there; set another location with --upload_to")
        if (run / RUN).exists():
            self.files.put_file(str(run / RUN), f"{self.root}/{RUN}")

    def put_small_files(self, run: Path) -> None:
        """Copy the records of a run, e.g. metrics.jsonl and run.json."""
        for file in (file for pattern in RECORD_PATTERNS for file in run.glob(pattern)):
            self.files.put_file(str(file), f"{self.root}/{file.name}")

    def prune(self, run: Path) -> None:
        """Delete checkpoints that the run folder no longer has, once its newest one is uploaded."""
        kept, there = run_folder.checkpoints(run), self.steps()
        for step in there.keys() - kept.keys() if kept and max(kept) in there else ():
            self.files.rm(there[step], recursive=True)

    def get(self, path: str, folder: Path) -> None:
        """Copy the files under a path into a folder. Raises: UserError for a name that leads out of it."""
        for file in self.files.find(path):
            target = folder / os.path.relpath(file, path)
            if not target.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{self.url}: {file}: would be written outside the folder.")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(file, str(target))


def fetch(settings) -> None:
    """Download the newest checkpoint of --upload_to for --resume_from_checkpoint auto, unless the run folder has one.

    Raises: UserError for a location that cannot be read, or that holds a run that this run does not resume.
    """
    if not settings.upload_to:
        return
    if settings.node_local_storage:
        raise UserError(
            "--upload_to: rank 0 uploads, but with --node_local_storage each node has a part; remove one of them."
        )
    place, run = Place(settings.upload_to), run_folder.name_folder(settings)
    value = str(settings.resume_from_checkpoint or "false").lower()
    try:
        steps = place.steps()
        if value == "false" and (place.holds_run() or place.files.exists(f"{place.root}/{RUN}")):
            raise UserError(
                f"--upload_to {place.url}: already holds a run; use another location, or continue with "
                "--resume_from_checkpoint auto."
            )
        if not place.holds_run():
            return
        if value not in next_settings.NEWEST or not steps or run_folder.checkpoints(run):
            if not place.is_of(run):
                raise UserError(f"--upload_to {place.url}: holds another run than {run}; use another location.")
            return
        name = f"checkpoint-{max(steps)}"
        print(f"note: {run} does not hold a checkpoint: downloading {name} from {place.url}", flush=True)
        shutil.rmtree(run / STAGING, ignore_errors=True)
        place.get(steps[max(steps)], run / STAGING / name)
        for record in (run_folder.METRICS, RUN):
            if place.files.exists(there := f"{place.root}/{record}"):
                place.files.get_file(there, str(run / record))
        (run / STAGING / name).rename(run / name)
        (run / STAGING).rmdir()
    except UserError:
        raise
    except Exception as error:  # errors depend on the file system
        raise UserError(f"--upload_to {place.url}: cannot be read: {type(error).__name__}: {error}.") from None


class Uploads(TrainerCallback):
    """Upload each saved checkpoint in a thread of rank 0 while training continues.

    A failed upload is reported, and retried at the next save if the folder still exists.
    """

    def __init__(self, url: str, run: Path):
        self.place, self.run = Place(url), run
        self.names = set()  # checkpoints to upload
        self.thread = ThreadPoolExecutor(1, "zerofit-upload")

    def on_save(self, args, state, control, **kwargs):
        if args.process_index == 0:
            self.names.add(f"checkpoint-{state.global_step}")
            links = self.run / LINKED / str(state.global_step)
            folders = [self.run / name for name in sorted(self.names) if (self.run / name).is_dir()]
            self.thread.submit(self._upload, [_linked(folder, links) for folder in folders], links)

    def finish(self, *more: Path) -> None:
        """Wait until all checkpoints, further folders and the records of the run are uploaded."""
        remaining = [self.run / name for name in sorted(self.names) if (self.run / name).is_dir()]
        last = self.thread.submit(self._upload, [*remaining, *more], self.run / LINKED)
        while not wait([last], timeout=WAIT_REPORT_SECONDS).done:
            print(f"note: training has finished; waiting for the upload to {self.place.url}", flush=True)
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
        except Exception as error:  # errors depend on the file system; training continues
            print(f"WARNING: {self.place.url}: {name} was not uploaded ({type(error).__name__}: {error}); the next "
                  "save retries it", flush=True)  # fmt: skip
        shutil.rmtree(links, ignore_errors=True)


def _linked(folder: Path, links: Path) -> Path:
    """Return a hard-linked copy, which survives rotation; the folder itself if the disk does not support links."""
    try:
        return Path(shutil.copytree(folder, links / folder.name, copy_function=os.link))
    except OSError:
        return folder
