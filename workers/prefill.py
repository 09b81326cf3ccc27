"""A prefill worker: reads a document, computes its KV, hands the pages to the pool.

    python -m workers.prefill --master HOST:PORT --document FILE

A client of the pool with a model of its own.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

from kvstore.client.store import KVStore
from kvstore.connectors.transformers import PooledPrefix
from kvstore.ids import short
from workers.conversation import read_document, shared_tokens
from workers.demo_reports import PrefillReport, write_report
from workers.engine_options import engine_parser, load_model, run_program, say, secret_of
from workers.generation import append, warm_up

if TYPE_CHECKING:
    import argparse

    from workers.generation import LanguageModel

PROGRAM: Final = "prefill"


def hand_over(language: LanguageModel, prefix: PooledPrefix, document: str) -> PrefillReport:
    """Compute what the pool does not have of the document's pages, and store it."""
    tokens = shared_tokens(language.chat, document)
    page_tokens = prefix.page_tokens
    whole = len(tokens) // page_tokens * page_tokens
    say(PROGRAM, f"the document is {len(tokens)} tokens, {whole // page_tokens} pages")
    started = time.perf_counter()
    cache, fetched = prefix.fetch(tokens)
    if fetched.tokens < whole:
        append(language.model, cache, tokens[fetched.tokens : whole])
    computed = time.perf_counter()
    kept = prefix.store(tokens[:whole], cache)
    report = PrefillReport(
        pid=os.getpid(),
        namespace=short(prefix.namespace.id),
        tokens=whole,
        reused_tokens=fetched.tokens,
        prefill_s=computed - started,
        pages_stored=kept.stored,
        bytes_moved=kept.bytes_moved,
        store_s=time.perf_counter() - computed,
        trouble=kept.trouble or fetched.trouble,
    )
    say(
        PROGRAM,
        f"computed {whole - fetched.tokens} tokens in {report.prefill_s:.2f} s, "
        f"handed over {kept.stored} pages ({kept.bytes_moved / 1e6:.0f} MB) "
        f"in {report.store_s:.2f} s{f'; {report.trouble}' if report.trouble else ''}",
    )
    return report


def run(options: argparse.Namespace) -> None:
    """Load, connect, hand over."""
    document = read_document(options.document)
    with KVStore.connect(options.master, secret=secret_of(options), name=PROGRAM) as store:
        started = time.perf_counter()
        language = load_model(options.model)
        warm_up(language)
        prefix = PooledPrefix(store, language.model, language.model_id)
        say(PROGRAM, f"{language.model_id} is ready after {time.perf_counter() - started:.1f} s")
        report = hand_over(language, prefix, document)
    if options.report is not None:
        write_report(options.report, report)


def main() -> None:
    """Run the program; ends the process."""
    parser = engine_parser("workers.prefill", "Computes a document's KV and hands it to the pool.")
    options = parser.parse_args(sys.argv[1:])
    run_program("workers.prefill", lambda: run(options))


if __name__ == "__main__":
    main()
