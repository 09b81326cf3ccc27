"""The command `kvharbor`: its sub-commands, their options, and how errors end it.

Owns the command line. Every KVStoreError becomes one line on standard error and the exit code of
kvstore.exit_codes; `--json` may stand before or after the sub-command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path  # noqa: TC003 -- typer reads annotations when it runs
from typing import Annotated, Final

import typer

from kvstore import limits
from kvstore.cli import (
    doctor,
    masters,
    mooncake,
    output,
    pins,
    places,
    plan,
    policy,
    relocation,
    replicas,
    serving,
    standalone,
    tickets,
    tier,
    trace,
    workers,
)
from kvstore.cli.debug import dump_master
from kvstore.cli.disks import Disks, given_disks
from kvstore.cli.options import (
    MASTER,
    AsJson,
    Cluster,
    DataDir,
    Devices,
    Master,
    SecretFile,
    cluster_section,
    operator,
)
from kvstore.config import default_data_dir
from kvstore.errors import KVStoreError
from kvstore.exit_codes import ExitCode, exit_code_of

MASTER_ADMIN: Final = f"127.0.0.1:{limits.MASTER_ADMIN_PORT}"
WORKER: Final = f"127.0.0.1:{limits.WORKER_PORT}"
GATEWAY: Final = f"127.0.0.1:{limits.GATEWAY_PORT}"
WORKER_ADMIN: Final = f"127.0.0.1:{limits.WORKER_ADMIN_PORT}"
MasterAdmin = Annotated[
    str | None,
    typer.Option(help="The master's HTTP host:port, or off.", show_default=MASTER_ADMIN),
]
WorkerAdmin = Annotated[
    str | None,
    typer.Option(help="The worker's HTTP host:port, or off.", show_default=WORKER_ADMIN),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget the last run's pages and metadata.")]
Model = Annotated[str, typer.Option(help=f"With --pd: one of {', '.join(serving.MODELS)}.")]
SwitchRoles = Annotated[
    bool,
    typer.Option(
        "--switch-roles", help="With --pd: workers change between prefill and decode by need."
    ),
]
LayerGroups = Annotated[
    int,
    typer.Option(
        help="With --pd: hand prompts over by so many groups of layers, each while the next is "
        "computed; 1: all layers of a chunk at once. Worth it where moving KV takes about as long "
        "as computing it; at most the model's layers.",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(help="Serve a model by prefill and decode workers, so many of each: 1p2d."),
]
EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 failed, 2 an option, file or variable is wrong, 3 cannot be reached or "
    "not ready, 4 denied, 5 in use, 6 too little memory or disk, 7 another master leads, 8 a part "
    "of the pool ended by itself, 70 a bug of ours."
)

app = typer.Typer(
    name="kvharbor",
    help="A KV-cache pool for LLM serving.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

debugging = typer.Typer(help="Look inside a running pool.", no_args_is_help=True)
app.add_typer(debugging, name="debug")
tracing = typer.Typer(help="Learn from recorded requests.", no_args_is_help=True)
app.add_typer(tracing, name="trace")
app.add_typer(policy.app, name="policy")
app.add_typer(tier.app, name="tier")
app.add_typer(doctor.app, name="doctor")
app.add_typer(replicas.app, name="replicas")
app.add_typer(tickets.app, name="tickets")
app.add_typer(workers.app, name="workers")
for command in (masters.masters, pins.pin, pins.unpin, pins.pins):
    app.command()(command)
for shown in (relocation.drain, relocation.copy, relocation.move, relocation.rebalance):
    app.command(epilog=relocation.EXAMPLES[shown.__name__])(shown)
app.command()(relocation.undrain)
app.command()(relocation.relocations)
app.command(epilog=plan.EXAMPLE)(plan.plan)
app.command(epilog=mooncake.EXAMPLE)(mooncake.mooncake_shim)


@app.callback()
def before(context: typer.Context, as_json: AsJson = False) -> None:
    """A KV-cache pool for LLM serving."""
    context.obj = as_json


@app.command()
def up(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    data_dir: DataDir = None,
    dram: Annotated[
        str | None, typer.Option(help="Memory to lend, 64MiB or more.", show_default="1GiB")
    ] = None,
    hbm: Devices = None,
    nvme: Disks = None,
    listen: Annotated[
        str | None, typer.Option(help="The master's host:port.", show_default=MASTER)
    ] = None,
    worker_listen: Annotated[
        str | None, typer.Option(help="The worker's host:port.", show_default=WORKER)
    ] = None,
    admin: MasterAdmin = None,
    worker_admin: WorkerAdmin = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with sections cluster, master, worker.")
    ] = None,
    secret_file: SecretFile = None,
    fresh: Fresh = False,
    pd: Shape = None,
    model: Model = serving.MODELS[0],
    gateway: Annotated[str, typer.Option(help="With --pd: the gateway's host:port.")] = GATEWAY,
    switch_roles: SwitchRoles = False,
    layer_groups: LayerGroups = 1,
    as_json: AsJson = False,
) -> None:
    """Run a standalone pool, master and worker, until a signal stops it.

    A pool that was killed finds its pages again at the next start from the same data folder.
    Port 0 takes a free one.
    """
    where = _places(data_dir)
    standalone.require_alone(config)
    cluster = cluster_section(config, secret_file)
    wish = serving.parse_serving(
        pd, model, gateway, cluster.secret_file,
        switch_roles=switch_roles, layer_groups=layer_groups,
    )  # fmt: skip
    disks = given_disks(config, nvme or (), where)
    devices = ",".join(hbm or ()) or None
    wiring = standalone.Wiring(
        config, secret_file, dram, listen, admin, worker_listen, worker_admin, devices, disks
    )
    places.prepare(where)
    lock = places.lock(where)
    if fresh:
        places.wipe(where)
        places.prepare(where)
    places.prepare_disks(where, [disk.path for disk in disks])
    shown = str(where.data_dir), str(where.segment_dir)
    try:
        with standalone.StandalonePool(where, wiring, cluster.secret(), lock) as pool:
            ready = pool.start()
            served = None if wish is None else pool.serve(wish, ready)
            if as_json or context.obj:
                output.print_json(output.ready_value(ready, shown, os.getpid(), served))
            else:
                output.print_ready(ready, shown, served)
            pool.wait()
    except standalone.Stopped:
        return
    finally:
        os.close(lock)


@app.command()
def status(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show workers, segments with bytes by state, pages and counters."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.status()
    if as_json or context.obj:
        output.print_json(found)
    else:
        output.print_status(found)


@app.command()
def wipe(context: typer.Context, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Remove the pages and metadata of a standalone pool that does not run."""
    where = _places(data_dir)
    freed = 0
    if where.data_dir.exists():
        lock = places.lock(where)
        freed = places.wipe(where)
        os.close(lock)
    else:
        freed = places.wipe_segments(where)
    if as_json or context.obj:
        output.print_json({"freed_bytes": freed})
    else:
        print(f"freed {output.size_text(freed)}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Run a pool, a prefill and a decode process on a real model; --help shows its options."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers.demo", *context.args])


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def drill(context: typer.Context) -> None:
    """Break a deployment on purpose and check what clients get; --list shows the drills."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers.drills", *context.args])


@debugging.command()
def dump(
    context: typer.Context,
    data_dir: DataDir = None,
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Write the master's last events to a file, which a simulator can replay."""
    secret = cluster_section(None, secret_file).secret()
    path = dump_master(_places(data_dir).data_dir, secret)
    if as_json or context.obj:
        output.print_json({"file": str(path)})
    else:
        print(path)


@tracing.command()
def replay(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Trace: one JSON object a line.")],
    capacity: Annotated[list[int], typer.Option(help="Pages of the pool; may be repeated.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Of eviction, as name or name:parameter=value; may be repeated.",
            show_default="the master's",
        ),
    ] = None,
    nvme_capacity: Annotated[
        int, typer.Option(help="Pages of a drive below memory; 0 for none.")
    ] = 0,
    nvme_admission: Annotated[
        list[str] | None,
        typer.Option(
            help="Which pages a drive takes, as --policy; may be repeated.",
            show_default="the master's",
        ),
    ] = None,
    watermark_demote: Annotated[
        float, typer.Option(help="Share of memory above which pages are copied to the drive.")
    ] = limits.WATERMARK_DEMOTE,
    move_s: Annotated[float, typer.Option(help="Time of each move between the tiers.")] = 0.0,
    hints: Annotated[
        str, typer.Option(help="given (by callers: a trace has none) or learned.")
    ] = "given",
    page_tokens: Annotated[int, typer.Option(help="Tokens that one of hash_ids stands for.")] = 512,
    lease_ttl_s: Annotated[
        float, typer.Option(help="Lease of each hit; 0 for none: nothing is brought up.")
    ] = 0.0,
    page_ttl_s: Annotated[float, typer.Option(help="TTL of pages.")] = limits.PAGE_TTL_S,
    as_json: AsJson = False,
) -> None:
    """Show what a pool of so many pages would have served, by the master's own code.

    Time is virtual, answers are not stored, computing takes no time. Each line of the trace has
    `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids`, one a page.
    """
    given = [f"--capacity={pages}" for pages in capacity]
    given += [f"--policy={name}" for name in policy or ()]
    given += [f"--nvme-admission={name}" for name in nvme_admission or ()]
    given += [f"--nvme-capacity={nvme_capacity}", f"--watermark-demote={watermark_demote}"]
    given += [f"--move-s={move_s}", f"--hints={hints}"]
    given += [f"--page-tokens={page_tokens}", f"--lease-ttl-s={lease_ttl_s}"]
    returncode, rows = trace.replay([*given, f"--page-ttl-s={page_ttl_s}", "--", str(file)])
    if returncode:
        raise typer.Exit(returncode)
    if as_json or context.obj:
        output.print_json({"trace": str(file), "pools": rows})
    else:
        output.print_replayed(rows)


@app.command()
def version(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the version."""
    # Only now: what reads the metadata of packages takes an eighth of a command's start.
    from importlib.metadata import version as distribution_version

    found = distribution_version("kvharbor")
    if as_json or context.obj:
        output.print_json({"version": found})
    else:
        print(found)


def main() -> None:
    """Run the command line; ends the process."""
    try:
        app(prog_name="kvharbor")
    except KVStoreError as error:
        output.print_error(str(error))
        sys.exit(exit_code_of(error))
    except BrokenPipeError:
        # Whoever read the output has gone; nothing can be said any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)


def _places(data_dir: Path | None) -> places.Places:
    return places.places_of(data_dir or default_data_dir(os.environ))


if __name__ == "__main__":
    main()
