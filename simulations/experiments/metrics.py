"""The figures that experiments compare, and how they are written."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure: its heading, the unit in which papers give it, and its decimals."""

    heading: str
    scale: float
    decimals: int

    def write(self, value: float, *, sign: bool = False) -> str:
        """Return a value in the metric's unit."""
        return f"{self.scale * value:{'+' if sign else ''}.{self.decimals}f}"

    def write_error(self, value: float) -> str:
        """Return a standard error in the metric's unit; where its decimals make it 0, its first digit that is not."""
        written = self.write(value)
        return written if float(written) or not value else f"{self.scale * value:.1g}"


METRICS = {
    "accuracy": Metric("test accuracy of the last model, %", 100, 2),
    "tail_accuracy": Metric("test accuracy, mean of the last 5 evaluations, %", 100, 2),
    "epsilon": Metric("epsilon", 1, 3),
    "uplink": Metric("uplink, MB", 1e-6, 2),
    "downlink": Metric("downlink, MB", 1e-6, 2),
    "uplink_saving": Metric("uplink, times fewer bytes", 1, 1),
    "total_density": Metric("total density", 1, 3),
    "loss": Metric("test loss of the last model", 1, 4),
    "overlap": Metric("histogram of masks under that of random ones", 1, 3),
    "uniform_distance": Metric("chi-squared distance of canary ranks from uniform", 1, 3),
    "control_distance": Metric("the same of phrases not in the data", 1, 3),
    "exposure": Metric("mean exposure, bits", 1, 2),
    "mse": Metric("MSE", 1, 4),
    "psnr": Metric("PSNR, dB", 1, 1),
    "ssim": Metric("SSIM", 1, 3),
    "error": Metric("squared error", 1, 5),
    "bound": Metric("bound", 1, 5),
    "solvable": Metric("share of pixels with an equation, %", 100, 1),
    "ratio": Metric("error over bound", 1, 3),
}
