"""A ServerApp that sends a small model around."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Ask the first node as often as the run config says."""
    model = {"weight": Array(np.zeros((3, 12), np.float32)), "bias": Array(np.zeros(3, np.float32))}
    while not (nodes := list(grid.get_node_ids())):
        pass
    for _ in range(int(context.run_config["messages"])):
        content = RecordDict({"arrays": ArrayRecord(model)})
        (reply,) = grid.send_and_receive([Message(content, nodes[0], "train")])
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
