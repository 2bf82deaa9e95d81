"""Classic models: trees, support vector machines, and the files of XGBoost and LightGBM."""

from __future__ import annotations
