"""Answer as nvidia-smi, from the machine's specification; like the real one, whatever CUDA_VISIBLE_DEVICES says."""

import argparse

from . import devices


def gpu(spec: dict, card: dict) -> dict[str, tuple]:
    """Return what --query-gpu can ask for: {field: (value, unit)}."""
    free, reserved = devices.free_mib(spec, card), card["reserved_mib"]
    has_mig = card["capability"] in ([8, 0], [9, 0], [10, 0])
    return {
        "index": (card["index"], ""), "uuid": (card["uuid"], ""), "name": (card["name"], ""),
        "count": (len(spec["gpus"]), ""),
        "memory.total": (card["total_mib"], "MiB"), "memory.free": (free, "MiB"), "memory.reserved": (reserved, "MiB"),
        "memory.used": (card["total_mib"] - reserved - free, "MiB"), "driver_version": (spec["driver"], ""),
        "compute_mode": (spec["compute_mode"], ""), "compute_cap": (".".join(map(str, card["capability"])), ""),
        "mig.mode.current": ("Enabled" if card["slices"] else "Disabled" if has_mig else "[N/A]", ""),
    }  # fmt: skip


def app(card: dict, pid: int) -> dict[str, tuple]:
    """Return what --query-compute-apps can ask for."""
    used = (devices.CONTEXT_MIB, "MiB")
    return {"pid": (pid, ""), "used_memory": used, "used_gpu_memory": used, "process_name": ("python", ""),
            "gpu_name": (card["name"], ""), "gpu_uuid": (card["uuid"], "")}  # fmt: skip


def csv(query: str, form: list[str], known: dict[str, tuple], rows: list[dict[str, tuple]]) -> int:
    """Print the fields of a query and return the exit code. known: a row, for its fields and units."""
    fields = [field.strip() for field in query.split(",")]
    if wrong := [field for field in fields if field not in known]:
        print(f'Field "{wrong[0]}" is not a valid field to query.\n')
        return 2
    if "noheader" not in form:
        print(", ".join(field + (f" [{known[field][1]}]" if known[field][1] else "") for field in fields))
    for row in rows:
        print(", ".join(f"{row[field][0]} {'' if 'nounits' in form else row[field][1]}".strip() for field in fields))
    return 0


def main(argv: list[str]) -> int:
    """Print the answer and return the exit code."""
    parser = argparse.ArgumentParser(prog="nvidia-smi", allow_abbrev=False)
    for names in (["--query-gpu"], ["--query-compute-apps"], ["--format"], ["-i", "--id"]):
        parser.add_argument(*names, default="")
    parser.add_argument("-L", "--list-gpus", action="store_true")
    given = parser.parse_args(argv[1:])
    spec, form, wanted = devices.read_spec(), given.format.split(","), given.id.split(",")
    cards = [card for card in spec["gpus"] if not given.id or str(card["index"]) in wanted or card["uuid"] in wanted]
    if not cards:
        print("No devices were found")
        return 6
    if given.query_gpu:
        return csv(given.query_gpu, form, gpu(spec, cards[0]), [gpu(spec, card) for card in cards])
    if given.query_compute_apps:
        rows = [app(card, pid) for card in cards for pid in devices.holders(spec, card["index"])]
        return csv(given.query_compute_apps, form, app(cards[0], 0), rows)
    cuda = devices.driver_cuda(spec)
    if not given.list_gpus:  # the real table has more lines
        print(
            f"NVIDIA-SMI {spec['driver']}  Driver Version: {spec['driver']}  CUDA Version: "
            f"{cuda // 1000}.{cuda % 1000 // 10}"
        )
    for card in cards:
        print(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})")
        for i, part in enumerate(card["slices"]):
            print(f"  MIG {part['profile']}     Device  {i}: (UUID: {part['uuid']})")
    return 0
