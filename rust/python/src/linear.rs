//! Products with constant weights over the linear crate.

use linear::{Bf16, Error, Kind, Level, Part, Rows, RowsMut, Threads, Weights, multiply, pack_into, packed_lanes};
use pyo3::exceptions::{PyMemoryError, PyOSError};
use pyo3::prelude::*;

use crate::buffers::{Readable, Writable};
use crate::errors::bug;
use crate::values::Living;

/// A caller's thread and its helpers.
#[pyclass(frozen, module = "pyengine._native")]
pub struct LinearThreads {
    pub living: Living<Threads>,
    #[pyo3(get)]
    count: usize,
}

#[pymethods]
impl LinearThreads {
    #[new]
    fn new(count: usize) -> PyResult<Self> {
        let threads = Threads::new(count).map_err(|error| PyOSError::new_err(format!("{count} threads: {error}")))?;
        Ok(Self { count: threads.count(), living: Living::new(threads) })
    }
}

/// A packed matrix.
#[pyclass(frozen, module = "pyengine._native")]
pub struct LinearWeights(Weights);

#[pymethods]
impl LinearWeights {
    #[new]
    fn new(
        py: Python<'_>,
        parts: Vec<(Readable, usize)>,
        inputs: usize,
        dtype: &str,
        threads: &LinearThreads,
    ) -> PyResult<Self> {
        let kind = kind(dtype)?;
        let parts: Vec<_> =
            parts.iter().map(|(bytes, outputs)| part(bytes.bytes(), *outputs, inputs)).collect::<Result<_, _>>()?;
        let packed = threads.living.with(py, |threads| Weights::pack(&parts, kind, threads))?;
        packed.map(Self).map_err(refused)
    }

    #[getter]
    fn outputs(&self) -> usize {
        self.0.packed().outputs()
    }

    #[getter]
    fn inputs(&self) -> usize {
        self.0.packed().depth()
    }

    #[getter]
    fn size(&self) -> usize {
        self.0.bytes()
    }

    #[pyo3(signature = (x, stride, out, out_stride, rows, threads, level=None))]
    #[expect(clippy::too_many_arguments, reason = "two matrices, as numbers")]
    fn multiply(
        &self,
        py: Python<'_>,
        x: usize,
        stride: usize,
        out: usize,
        out_stride: usize,
        rows: usize,
        threads: &LinearThreads,
        level: Option<&str>,
    ) -> PyResult<()> {
        let level = level.map_or_else(|| Ok(Level::best()), find)?;
        let (inputs, outputs) = (self.0.packed().depth(), self.0.packed().outputs());
        if rows > 1 && (stride < inputs || out_stride < outputs) {
            return Err(bug(format!(
                "rows of {inputs} and {outputs} numbers cannot be {stride} and {out_stride} apart"
            )));
        }
        if !x.is_multiple_of(align_of::<f32>()) || !out.is_multiple_of(align_of::<f32>()) {
            return Err(bug("the addresses are not those of f32"));
        }
        // SAFETY: the stub's contract: the caller owns both matrices, keeps them and does not touch them meanwhile; where
        // there are none (no rows, no columns) nothing is read or written.
        let (x, out) = unsafe {
            (
                Rows::from_raw(x as *const f32, rows, inputs, stride),
                RowsMut::from_raw(out as *mut f32, rows, outputs, out_stride),
            )
        };
        threads.living.with(py, |threads| multiply(self.0.packed(), x, out, threads, level))
    }
}

/// Packs a matrix into a buffer of 32-bit numbers, as `LinearWeights` does for itself.
#[pyfunction]
pub fn pack_linear(
    py: Python<'_>,
    parts: Vec<(Readable, usize)>,
    inputs: usize,
    dtype: &str,
    mut out: Writable,
    threads: &LinearThreads,
) -> PyResult<()> {
    let kind = kind(dtype)?;
    let parts: Vec<_> =
        parts.iter().map(|(bytes, outputs)| part(bytes.bytes(), *outputs, inputs)).collect::<Result<_, _>>()?;
    let expected = packed_lanes(kind, parts.iter().map(|part| part.shape().0).sum(), inputs);
    // SAFETY: any bits are a number.
    let (before, lanes, behind) = unsafe { out.bytes().align_to_mut::<u32>() };
    if lanes.len() != expected || !before.is_empty() || !behind.is_empty() {
        return Err(bug(format!("the packed matrix has {expected} numbers of 32 bits, not {}", lanes.len())));
    }
    threads.living.with(py, |threads| pack_into(&parts, kind, lanes, threads))?.map_err(refused)
}

fn kind(dtype: &str) -> PyResult<Kind> {
    match dtype {
        "float32" => Ok(Kind::F32),
        "bfloat16" => Ok(Kind::Bf16),
        _ => Err(bug(format!("weights are packed as float32 or bfloat16, not {dtype:?}"))),
    }
}

fn refused(error: Error) -> PyErr {
    match error {
        Error::Memory(_) => PyMemoryError::new_err(error.to_string()),
        Error::Widths(..) => bug(error.to_string()),
    }
}

/// Names of the instruction sets that this processor has, the best last.
pub fn levels() -> impl ExactSizeIterator<Item = &'static str> {
    Level::available().iter().map(|level| level.name())
}

/// The level of a name. BugError if this processor lacks it.
pub fn find(name: &str) -> PyResult<Level> {
    let level = Level::available().iter().find(|level| level.name() == name);
    level.copied().ok_or_else(|| {
        bug(format!("{name:?} is none of this processor's: {}", levels().collect::<Vec<_>>().join(", ")))
    })
}

fn part(bytes: &[u8], outputs: usize, inputs: usize) -> PyResult<Part<'_>> {
    let count = outputs * inputs;
    let wrong = || bug(format!("{} bytes are no {outputs} x {inputs} numbers of float32 or bfloat16", bytes.len()));
    if bytes.len() == 4 * count {
        // SAFETY: any bits are a number of either kind.
        let (before, numbers, _) = unsafe { bytes.align_to::<f32>() };
        return if before.is_empty() { Ok(Part::F32(Rows::new(numbers, outputs, inputs))) } else { Err(wrong()) };
    }
    // SAFETY: as above.
    let (before, numbers, _) = unsafe { bytes.align_to::<Bf16>() };
    if before.is_empty() && bytes.len() == 2 * count {
        return Ok(Part::Bf16(Rows::new(numbers, outputs, inputs)));
    }
    Err(wrong())
}
