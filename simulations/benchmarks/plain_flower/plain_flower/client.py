"""A ClientApp that trains in its own process: it imports torch for every message."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take one step of a small model and return it."""
    arrays = message.content.array_records["arrays"]
    model = torch.nn.Linear(12, 3)
    model.load_state_dict(arrays.to_torch_state_dict())
    model(torch.ones(8, 12)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 8})})
    return Message(content, reply_to=message)
