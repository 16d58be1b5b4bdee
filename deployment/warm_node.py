"""A SuperNode whose ClientApps start warm: ``python -m deployment.warm_node [options of flower-supernode]``.

A SuperNode starts a process for every message, and importing Flower takes that process far longer than its work. Here
a helper imports Flower once; each ``flwr-clientapp`` that SuperExec asks for is then a fork of it. The app itself is
loaded anew from its bundle each time: nothing of it outlives its message.

Stands alone: imports nothing of Fedsieve, so that a node's image needs this file and Flower, and no more.
"""

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

_COMMAND = "flwr-clientapp"
_PRELOADED = ("flwr.supernode.cli", "flwr.clientapp", "google.protobuf", "grpc", "numpy")

# What SuperExec finds as 'flwr-clientapp': hands its arguments to the helper, or does it the slow way without one.
_STUB = """\
#!{python} -IS
import json, os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as helper:
        helper.connect({address!r})
        helper.sendall(json.dumps(sys.argv[1:]).encode())
        helper.shutdown(socket.SHUT_WR)
        if helper.recv(1) != b"+":
            raise OSError("refused")
except OSError:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


def main() -> NoReturn:
    """Start the helper, then become the SuperNode."""
    real = shutil.which(_COMMAND, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    node = shutil.which("flower-supernode", path=str(Path(sys.executable).parent)) or "flower-supernode"
    if real is None:
        sys.exit(f"{_COMMAND} is not installed beside {sys.executable}: pip install flwr")
    folder = Path(tempfile.mkdtemp(prefix="fedsieve-node-"))  # for this user alone
    address = str(folder / "helper.sock")
    stub = folder / _COMMAND
    stub.write_text(_STUB.format(python=sys.executable, address=address, real=real))
    stub.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    node_lives, node_holds = os.pipe()  # reads as ended once the SuperNode is gone, however it went
    if os.fork() == 0:
        os.close(node_holds)
        try:
            _help(listener, node_lives)
        except Exception:
            traceback.print_exc()
            print("the warm helper has failed: ClientApps start the slow way from now on", file=sys.stderr)
            listener.close()
            os.fdopen(node_lives).read()  # until the SuperNode is gone: what it finds in the folder starts them so
        finally:
            shutil.rmtree(folder)
            os._exit(os.EX_OK)
    os.set_inheritable(node_holds, True)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    os.execvp(node, [node, *sys.argv[1:]])


def _help(listener: socket.socket, node_lives: int) -> None:
    """Fork a ClientApp for every request until the SuperNode is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the SuperNode, whose end ends this
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for module in _PRELOADED:
        importlib.import_module(module)
    while True:
        ready, _, _ = select.select([listener.fileno(), node_lives], [], [])
        if node_lives in ready:
            return
        _clear_away()
        with contextlib.suppress(OSError, ValueError), listener.accept()[0] as asker:
            with asker.makefile() as request:
                arguments = json.load(request)
            if os.fork() == 0:
                listener.close()  # once the helper is gone, nobody must seem to listen
                _become_client_app(arguments)
            asker.sendall(b"+")


def _clear_away() -> None:
    """Let the system forget the ClientApps that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_client_app(arguments: list[str]) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = [_COMMAND, *arguments]
        importlib.import_module("flwr.supernode.cli").flwr_clientapp()
    except SystemExit:
        pass  # it has said why
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(os.EX_OK)  # nobody asks how it ended: the SuperNode waits for its reply


if __name__ == "__main__":
    main()
