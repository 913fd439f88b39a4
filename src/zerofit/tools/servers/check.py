"""Define Check: one thing that a server must do as the trained model does, and whether it was seen to."""

from dataclasses import dataclass


@dataclass
class Check:
    """A line of the export's report. holds: None for what could not be tried here."""

    what: str
    holds: bool | None
    says: str

    @property
    def line(self) -> str:
        """Return the line as it is printed."""
        return f"{ {True: 'holds', False: 'fails', None: 'not proven'}[self.holds]:<12}{self.what}: {self.says}"
