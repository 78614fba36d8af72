"""`researcher ui`: the web page of the studies with MLflow next to it, or only MLflow."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import webbrowser

from foundation import logs
from foundation.clock import SystemClock
from foundation.commandline import UsageError
from researcher.cli import DONE, FAILED
from researcher.cli.drafting import GoalDrafting, TextDrafting
from researcher.cli.servers import ask_servers
from researcher.home import Home, open_home
from researcher.schedule.daemon import ensure_daemon
from researcher.serving import Access, listening, load_token, serve
from researcher.store.mlflow_sink import MlflowSink
from researcher.web.app import Services, create_app
from researcher.web.sheets import Sheets
from researcher.web.tracking import MLFLOW_ENVIRON, Tracking, answers, child, free_port, mlflow_command


def ui_command(args: argparse.Namespace) -> int:
    """Serve the page until interrupted, and open it at the list of studies or at one study."""
    logs.configure("WARNING")
    home = open_home()
    if args.mlflow:
        return _mlflow(home, args)
    path = "" if args.study is None else f"/studies/{home.store.studies.resolve(args.study)}"
    token = load_token(os.environ, args.token_file)
    with listening(args.host, args.port) as listener:
        public_url = args.public_url and args.public_url.rstrip("/")
        access = Access(host=args.host, port=listener.getsockname()[1], token=token, public_url=public_url)
        tracking = Tracking(home.store, port=args.mlflow_port, local=access.local)
        studies = TextDrafting(home)
        goals = GoalDrafting(studies, ensure_daemon)
        services = Services(ensure_daemon=ensure_daemon, drafting=studies, goals=goals, ask=ask_servers)
        app = create_app(home, access, Sheets(home, SystemClock()), tracking, services)
        try:
            serve(app, listener, lambda: _show(f"{access.url}{path}", args))
        finally:
            tracking.close()
    return DONE


def _mlflow(home: Home, args: argparse.Namespace) -> int:
    """Start MLflow's own page for the records, open it at the study, and run until interrupted."""
    study_id = home.store.studies.resolve(args.study or "latest")
    sink = MlflowSink(home.store)
    sink.drain(study_id)
    path = sink.page(study_id)
    if sink.tracking_uri.startswith(("http://", "https://")):
        _show(f"{sink.tracking_uri.rstrip('/')}/{path}", args)
        return DONE
    port = free_port(args.mlflow_port)
    if port is None:
        raise UsageError(f"port {args.mlflow_port} is taken; choose another --mlflow-port, or 0 for any")
    with child(mlflow_command(sink.tracking_uri, port), MLFLOW_ENVIRON) as server:
        if not answers(f"http://127.0.0.1:{port}/health", server, threading.Event()):
            sys.stderr.write(f"researcher ui: MLflow does not answer on port {port}; try another --mlflow-port\n")
            return FAILED
        _show(f"http://127.0.0.1:{port}/{path}", args)
        return server.wait()


def _show(url: str, args: argparse.Namespace) -> None:
    sys.stdout.write((json.dumps({"url": url}) if args.json else url) + "\n")
    sys.stdout.flush()
    if not args.no_browser:  # in a thread: a terminal browser only returns when it is closed
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
