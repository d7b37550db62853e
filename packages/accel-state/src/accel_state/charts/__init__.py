"""Pages with charts for commands of other packages: one HTML file each, drawn by uPlot 1.6.32 (MIT, in this folder)."""
