"""The exceptions of Fedsieve.

::

    FedsieveError
    ├── ConfigError         a run-config key is unknown, missing or out of range
    ├── DatasetError        a data set cannot be found, read or split as asked
    ├── ModelError          a model cannot be built, or does not fit the data or the plan
    ├── AccountingError     a privacy account cannot be computed or calibrated as asked
    ├── WireError           bytes from the other side are not what they claim to be
    ├── PlanRefused         a site will not carry out a plan; nothing was spent
    ├── ModelMissing        a site does not hold the model that a plan builds on; nothing was spent
    ├── NoRelease           a site was charged for a round and failed in it: its operator alone is told why
    ├── SiteUnreachable     a site's daemon cannot be reached, or fails
    │   └── DaemonStopped   it was there and stopped in the middle: asking again costs nothing
    ├── LedgerError         a site's privacy ledger is missing, damaged, too new or cannot be written
    ├── RunFolderError      the files of a run are missing, damaged or belong to another run
    ├── FederationError     the sites that a run needs did not come, or answered nonsense when joining
    ├── NothingLearned      a run ended in which no round counted
    └── DeploymentError     a process of a deployment cannot be reached, refuses or does not come up

Messages name the value, what was expected, and what to do about it.
"""


class FedsieveError(Exception):
    """Base of every error that Fedsieve raises on purpose."""


class ConfigError(FedsieveError):
    """A run-config key is unknown, missing or out of range."""


class DatasetError(FedsieveError):
    """A data set cannot be found, read or split as asked."""


class ModelError(FedsieveError):
    """A model cannot be built, or does not fit the data or the plan."""


class AccountingError(FedsieveError):
    """A privacy account cannot be computed or calibrated as asked."""


class WireError(FedsieveError):
    """Bytes from the other side are not what they claim to be."""


class PlanRefused(FedsieveError):  # noqa: N818 - it is an answer, not a fault
    """A site will not carry out a plan; nothing was spent.

    ``for_good``: nor the next one of the same run.
    """

    def __init__(self, reason: str, *, for_good: bool = True) -> None:
        super().__init__(reason)
        self.for_good = for_good


class ModelMissing(FedsieveError):  # noqa: N818 - it is an answer, not a fault
    """A site does not hold the model that a plan builds on; nothing was spent."""


class NoRelease(FedsieveError):  # noqa: N818 - it is an answer, not a fault
    """A site was charged for a round and failed in it: its operator alone is told why, since records may be why."""

    def __init__(self) -> None:
        super().__init__("the site has no release for this round; its operator finds the reason in the site's log")


class SiteUnreachable(FedsieveError):  # noqa: N818 - it is a state, not a fault
    """A site's daemon cannot be reached, or fails."""


class DaemonStopped(SiteUnreachable):
    """A site's daemon was there and stopped in the middle: asking again costs nothing."""


class LedgerError(FedsieveError):
    """A site's privacy ledger is missing, damaged, too new or cannot be written."""


class RunFolderError(FedsieveError):
    """The files of a run are missing, damaged or belong to another run."""


class FederationError(FedsieveError):
    """The sites that a run needs did not come, or answered nonsense when joining."""


class NothingLearned(FedsieveError):  # noqa: N818 - it says what came of a run
    """A run ended in which no round counted: its model is the first one."""


class DeploymentError(FedsieveError):
    """A process of a deployment cannot be reached, refuses or does not come up."""
