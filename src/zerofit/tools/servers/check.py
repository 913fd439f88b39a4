"""A check of a server's behavior against the trained model."""

from dataclasses import dataclass


@dataclass
class ServerCheck:
    """A line of the export's report. holds: None if the check could not run here."""

    what: str
    holds: bool | None
    says: str

    @property
    def line(self) -> str:
        """Return the line as it is printed."""
        status = {True: "holds", False: "fails", None: "not checked"}[self.holds]
        return f"{status:<12}{self.what}: " + self.says
