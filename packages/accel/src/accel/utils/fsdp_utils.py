"""FSDP, under the module path that other libraries know."""

from accel_checkpoint.names import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accel_checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME

from ..core.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from ..fsdp.merge import merge_fsdp_weights as merge_fsdp_weights
from ..fsdp.plugin import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from ..fsdp.plugin import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from ..functions.fsdp2 import ensure_weights_retied as ensure_weights_retied
from ..functions.fsdp2 import fsdp2_apply_ac as fsdp2_apply_ac
from ..functions.fsdp2 import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from ..functions.fsdp2 import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from ..functions.fsdp2 import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from ..functions.fsdp2 import fsdp2_prepare_model as fsdp2_prepare_model
from ..functions.fsdp2 import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from ..functions.fsdp2 import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from ..functions.fsdp2 import get_parameters_from_modules as get_parameters_from_modules
from ..functions.fsdp2 import model_has_dtensor as model_has_dtensor
from ..functions.fsdp_model_io import load_fsdp_model as load_fsdp_model
from ..functions.fsdp_model_io import load_fsdp_optimizer as load_fsdp_optimizer
from ..functions.fsdp_model_io import save_fsdp_model as save_fsdp_model
from ..functions.fsdp_model_io import save_fsdp_optimizer as save_fsdp_optimizer
