//! What XLA may call: functions of the xla crate in capsules, as `jax.ffi` takes them.

use std::ffi::c_void;
use std::ptr::NonNull;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use xla::{HANDLERS, use_threads};

#[pyfunction]
pub fn xla_handlers(py: Python<'_>, threads: usize) -> PyResult<Bound<'_, PyDict>> {
    use_threads(threads).map_err(|error| PyOSError::new_err(format!("{threads} threads: {error}")))?;
    let capsules = PyDict::new(py);
    for (name, handler) in HANDLERS {
        // SAFETY: a function's address is not null, lives as long as the process, and needs no destructor.
        let capsule = unsafe {
            let address = NonNull::new_unchecked(*handler as *mut c_void);
            PyCapsule::new_with_pointer(py, address, c"xla._CUSTOM_CALL_TARGET")?
        };
        capsules.set_item(name, capsule)?;
    }
    Ok(capsules)
}
