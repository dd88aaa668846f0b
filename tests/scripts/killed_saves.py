"""How the jobs of killed_job.py save and load, by kind."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from killed_notes import RANK, WORLD, Evidence, Notes, pause, states_in, steps_in

KEPT, EVERY = int(os.environ.get("KILLS_KEPT", "8")), 4  # entries; steps from one to the next
NAMED_EVERY = 5 * EVERY  # of a job that saves in place, steps from one save under a name of its own to the next
OWN_RANK = "rank"  # in a file that holds it: of which rank it is


class Saver:
    """own_parts: each rank has a state of its own."""

    own_parts = False

    def __init__(self, directory: str, notes: Notes) -> None:
        self.directory, self.notes = directory, notes

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        return model, optimizer

    def is_over(self) -> bool:
        """Whether this rank has written all of its last save."""
        return True

    def close(self) -> None:
        pass

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError

    def load(self, path: str) -> Evidence:
        raise NotImplementedError


class Own(Saver):
    """A directory of three plain files, which rank 0 writes."""

    kept = KEPT

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if RANK:
            return
        self.put(f"step_{step}", step, model, optimizer)
        self.rotate(step)

    def rotate(self, step: int) -> None:
        old = Path(self.directory, f"step_{step - self.kept * EVERY}")
        if old.is_dir():
            self.notes.removing(old.name, step)
            shutil.rmtree(old)

    def put(self, name: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder = Path(self.directory, name)
        with self.notes.saving(name, step):
            folder.mkdir(exist_ok=True)
            torch.save(model.state_dict(), folder / "model.pt")
            pause()
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            pause()
            (folder / "state.json").write_text(json.dumps({"step": step}))

    def load(self, path: str) -> Evidence:
        model = torch.load(f"{path}/model.pt", weights_only=True)
        optimizer = torch.load(f"{path}/optimizer.pt", weights_only=True)
        state = json.loads(Path(path, "state.json").read_text())
        return [*steps_in("model", model), *states_in("optimizer", optimizer), ("state.json", state["step"])]


class Copied(Own):
    kept = 1 << 20


class InPlace(Own):
    """Two files over those of the last save."""

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if RANK:
            return
        self.put("last", step, model, optimizer)
        if step % NAMED_EVERY == 0:
            self.put(f"step_{step}", step, model, optimizer)

    def put(self, name: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder = Path(self.directory, name)
        with self.notes.saving(name, step):
            folder.mkdir(exist_ok=True)
            torch.save(model.state_dict(), folder / "model.pt")
            pause()
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, path: str) -> Evidence:
        model = torch.load(f"{path}/model.pt", weights_only=True)
        optimizer = torch.load(f"{path}/optimizer.pt", weights_only=True)
        return [*steps_in("model", model), *states_in("optimizer", optimizer)]


class InPlaceOnly(InPlace):
    """And nothing under another name."""

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if RANK == 0:
            self.put("last", step, model, optimizer)


class Parts(Saver):
    """A file of each rank, whose name does not say that this is a rank."""

    own_parts = True

    def name(self, step: int) -> str:
        return f"ckpt_{step}_{RANK}.pt"

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pause()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, OWN_RANK: RANK}
        with self.notes.saving(self.name(step), step):
            torch.save(state, Path(self.directory, self.name(step)))
        old = Path(self.directory, self.name(step - KEPT * EVERY))
        if old.exists():
            self.notes.removing(old.name, step)
            old.unlink()

    def load(self, path: str) -> Evidence:
        state = torch.load(path, weights_only=True)
        if state[OWN_RANK] != RANK:
            raise ValueError(f"rank {RANK} got the file of rank {state[OWN_RANK]}")
        found = [*steps_in("model", state["model"]), *states_in("optimizer", state["optimizer"])]
        return [*found, ("step", state["step"])]


class Shards(Own):
    """A directory of which each rank writes a file, and rank 0 two more. Rank 0 alone removes old ones, where it has them."""

    own_parts = True

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.put(f"step_{step}", step, model, optimizer)
        if RANK == 0:
            self.rotate(step)

    def put(self, name: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder = Path(self.directory, name)
        with self.notes.saving(name, step):
            folder.mkdir(exist_ok=True)
            if RANK == 0:
                torch.save(model.state_dict(), folder / "model.pt")
                pause()
            torch.save({"optimizer": optimizer.state_dict(), OWN_RANK: RANK}, folder / f"optim_{RANK}.pt")
            pause()
            if RANK == 0:
                (folder / "state.json").write_text(json.dumps({"step": step}))

    def load(self, path: str) -> Evidence:
        """All files, as a script may that has another number of ranks now."""
        found = steps_in("model", torch.load(f"{path}/model.pt", weights_only=True))
        for rank in range(WORLD):
            part = torch.load(f"{path}/optim_{rank}.pt", weights_only=True)
            if part[OWN_RANK] != rank:
                raise ValueError(f"optim_{rank}.pt is the file of rank {part[OWN_RANK]}")
            found += states_in(f"optim_{rank}", part["optimizer"])
        return [*found, ("state.json", json.loads(Path(path, "state.json").read_text())["step"])]


class OneFile(Parts):
    """A file that rank 0 writes."""

    own_parts = False

    def name(self, step: int) -> str:
        return f"step_{step}.pt"

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if RANK == 0:
            super().save(step, model, optimizer)

    def load(self, path: str) -> Evidence:
        state = torch.load(path, weights_only=True)
        found = [*steps_in("model", state["model"]), *states_in("optimizer", state["optimizer"])]
        return [*found, ("step", state["step"])]


class Named(Parts):
    def name(self, step: int) -> str:
        return f"ep0-ba{step}-rank{RANK}.pt"


class Dcp(Saver):
    """torch.distributed.checkpoint: each rank writes a part of the model, and a tensor of its own."""

    use_collectives = True

    def state(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        states = {f"{at}.{key}": of for at, each in enumerate(optimizer.state.values()) for key, of in each.items()}
        return {"model": model.state_dict(), "optimizer": states, f"own{RANK}": torch.full((1000,), step), "step": step}

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = self.state(step, model, optimizer)
        self.put(f"step_{step}", step, state)
        self.rotate(f"step_{step - KEPT * EVERY}")

    def rotate(self, name: str) -> None:
        old = Path(self.directory, name)
        if RANK == 0 and old.is_dir():
            self.notes.removing(name, EVERY)
            shutil.rmtree(old)

    def put(self, name: str, step: int, state: dict[str, object]) -> None:
        with self.notes.saving(name, step):
            dcp.save(state, checkpoint_id=Path(self.directory, name), use_collectives=self.use_collectives)

    def wanted(self) -> dict[str, object]:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return self.state(0, model, optimizer)

    def load(self, path: str) -> Evidence:
        state = self.wanted()
        dcp.load(state, checkpoint_id=path)
        return self.found(state)

    def found(self, state: dict[str, object]) -> Evidence:
        return [
            *(each for key in ("model", "optimizer", f"own{RANK}") for each in steps_in(key, state[key])),
            ("step", state["step"]),
        ]


class DcpInPlace(Dcp):
    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = self.state(step, model, optimizer)
        self.put("last", step, state)
        if step % NAMED_EVERY == 0:
            self.put(f"step_{step}", step, state)


class DcpLocal(Dcp):
    use_collectives = False


class DcpAsync(Dcp):
    def __init__(self, directory: str, notes: Notes) -> None:
        super().__init__(directory, notes)
        self._group = dist.new_group()  # its collectives must not meet those of training
        self._future: Future[object] | None = None
        self._was_over = False

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self._future is not None:
            self._future.result()
        path, state = Path(self.directory, f"step_{step}"), self.state(step, model, optimizer)
        with self.notes.saving(f"step_{step}", step):
            self._future, self._was_over = dcp.async_save(state, checkpoint_id=path, process_group=self._group), False
        self.rotate(f"step_{step - KEPT * EVERY}")

    def is_over(self) -> bool:
        """And has made a step since: it is asked after each."""
        over, self._was_over = self._was_over, self._future is not None and self._future.done()
        return over

    def close(self) -> None:
        if self._future is not None:
            self._future.result()


class Accelerate(Saver):
    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare(model.module, optimizer)

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator.step = step
        for name in ["latest"] + [f"checkpoint_{step}"] * (step % NAMED_EVERY == 0):
            with self.notes.saving(name, step):
                self.accelerator.save_state(os.path.join(self.directory, name))

    def load(self, path: str) -> Evidence:
        from safetensors.torch import load_file

        model = load_file(f"{path}/model.safetensors")
        optimizer = torch.load(f"{path}/optimizer.bin", weights_only=True)
        states = {f"states{rank}": torch.load(f"{path}/random_states_{rank}.pkl", weights_only=False) for rank in range(WORLD)}
        found = [*steps_in("model", model), *states_in("optimizer", optimizer)]
        return [*found, *((name, each["step"]) for name, each in states.items())]


class S3Own(Own):
    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if RANK:
            return
        filesystem, root = fsspec.core.url_to_fs(self.directory)
        name = f"step_{step}"
        with self.notes.saving(name, step):
            for file, state in (("model.pt", model.state_dict()), ("optimizer.pt", optimizer.state_dict())):
                with filesystem.open(f"{root}/{name}/{file}", "wb") as opened:
                    torch.save(state, opened)
            filesystem.pipe_file(f"{root}/{name}/state.json", json.dumps({"step": step}).encode())
        old = f"{root}/step_{step - KEPT * EVERY}"
        if filesystem.exists(old):
            filesystem.rm(old, recursive=True)

    def load(self, path: str) -> Evidence:
        filesystem, root = fsspec.core.url_to_fs(path)
        with filesystem.open(f"{root}/model.pt") as file:
            model = torch.load(file, weights_only=True)
        with filesystem.open(f"{root}/optimizer.pt") as file:
            optimizer = torch.load(file, weights_only=True)
        state = json.loads(filesystem.cat_file(f"{root}/state.json"))
        return [*steps_in("model", model), *states_in("optimizer", optimizer), ("state.json", state["step"])]


class S3Dcp(Dcp):
    def put(self, name: str, step: int, state: dict[str, object]) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        with self.notes.saving(name, step):
            dcp.save(state, storage_writer=FsspecWriter(f"{self.directory}/{name}"))

    def rotate(self, name: str) -> None:
        filesystem, root = fsspec.core.url_to_fs(self.directory)
        if RANK == 0 and filesystem.exists(f"{root}/{name}"):
            filesystem.rm(f"{root}/{name}", recursive=True)

    def load(self, path: str) -> Evidence:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        state = self.wanted()
        dcp.load(state, storage_reader=FsspecReader(path))
        return self.found(state)


KINDS: dict[str, type[Saver]] = {
    "own": Own,
    "copy": Copied,
    "inplace": InPlace,
    "inplace_only": InPlaceOnly,
    "parts": Parts,
    "shards": Shards,
    "file": OneFile,
    "named": Named,
    "dcp": Dcp,
    "dcp_inplace": DcpInPlace,
    "dcp_async": DcpAsync,
    "dcp_local": DcpLocal,
    "accelerate": Accelerate,
    "s3_own": S3Own,
    "s3_dcp": S3Dcp,
}
