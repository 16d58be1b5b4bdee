"""``fedsieve methods``: what each method uploads, protects and costs, from the registry alone."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.charges import neighbours_of
from common.methods import METHODS, Method, method_of

_UPLOADS = {
    "values": "k values; the mask is known",
    "indices and values": "k values and their indices",
    "measurements": "p measurements",
}


def print_table() -> None:
    """Print what each method does, uploads, protects and how it is accounted: a narrow screen breaks no name."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for method in METHODS.values():
        facts = f"uploads {method.uploads}; unit: {_unit(method)}; accounting: {_accounting(method)}"
        table.add_row(method.name, f"{method.title}\n[dim]{escape(facts)}\n{escape(method.paper)}[/dim]\n")
    console = Console()
    console.print(table, highlight=False)
    console.print("fedsieve simulate --method NAME runs one; fedsieve methods show NAME explains it", highlight=False)


def print_method(name: str) -> None:
    """Explain one method."""
    method = method_of(name)
    console = Console()
    console.print(f"[bold]{method.name}[/bold]: {method.title}\n", highlight=False)
    console.print(method.about + "\n", highlight=False)
    neighbours = "; ".join(f"{unit}: {neighbours_of(unit)}" for unit in method.units)
    facts = {
        "uploads": _UPLOADS[method.uploads],
        "protects": f"a {' or a '.join(method.units)} ({neighbours})" if method.private else "nobody: NOT PRIVATE",
        "accounting": _accounting(method),
        "values": "calibrated to the noise, f32, f16 or int8" if method.calibrated else "f32, f16 or int8",
        "paper": method.paper,
        "code": f"common/methods, client/mechanisms/{method.mechanism}.py, server/methods/{method.server}.py",
    }
    for heading, fact in facts.items():
        console.print(f"{heading.ljust(12)}{fact}", highlight=False, soft_wrap=True)


def _unit(method: Method) -> str:
    return " or ".join(method.units) if method.private else "none"


def _accounting(method: Method) -> str:
    return method.accounting if method.private else "NOT PRIVATE"
