"""The names that accel_plan exports."""

from .plan import PlanRequest as PlanRequest
from .plan import RankPlan as RankPlan
from .plan import make_plan as make_plan
from .report import as_text as as_text
