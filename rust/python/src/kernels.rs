//! The contracts of kernels/ on the CPU, over the kernels crate. Tensors come as addresses; what fits what is checked here,
//! that the memory is there is the caller's promise (the stub says so).

use kernels::{Attention, Bf16, Copied, Level, Norms, Number, Pages, Plan, RmsNorm, Rope, Sequence, Strips, Swiglu};
use pyo3::prelude::*;

use crate::buffers::Readable;
use crate::errors::bug;
use crate::linear::{LinearThreads, find};

/// An address and the way from row to row.
type Matrix = (usize, usize);
/// An address and the ways from row to row and from head to head.
type Heads = (usize, usize, usize);
/// An address; the ways from keys to values, from head to head, from page to page, from token to token; how many heads,
/// pages, tokens of a page, numbers of a head.
type PageTensor = (usize, [usize; 4], [usize; 4]);

/// Calls a generic function with the number types of two tensors.
macro_rules! typed {
    ($one:expr, $other:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match ($one, $other) {
            (false, false) => $function::<f32, f32>($($argument),*),
            (false, true) => $function::<f32, Bf16>($($argument),*),
            (true, false) => $function::<Bf16, f32>($($argument),*),
            (true, true) => $function::<Bf16, Bf16>($($argument),*),
        }
    };
}

/// Attention of one step: what is the same for all layers.
#[pyclass(frozen, module = "pyengine._native")]
pub struct AttentionPlan(Plan);

#[pymethods]
impl AttentionPlan {
    #[new]
    #[pyo3(signature = (rows, lengths, tables, window, group, pages, page_tokens))]
    fn new(
        rows: Vec<usize>,
        lengths: Vec<usize>,
        tables: Readable,
        window: Option<usize>,
        group: usize,
        pages: usize,
        page_tokens: usize,
    ) -> PyResult<Self> {
        let wrong = || bug("rows, lengths and tables do not fit each other");
        if rows.len() != lengths.len() + 1 || page_tokens == 0 || !rows.is_sorted() {
            return Err(wrong());
        }
        let (chunks, rest) = tables.bytes().as_chunks::<4>();
        if !rest.is_empty() {
            return Err(wrong());
        }
        let tables: Vec<i32> = chunks.iter().copied().map(i32::from_ne_bytes).collect();
        let width = tables.len() / lengths.len().max(1);
        if width * lengths.len() != tables.len() {
            return Err(wrong());
        }
        let mut sequences = Vec::with_capacity(lengths.len());
        for (index, &length) in lengths.iter().enumerate() {
            let count = rows[index + 1] - rows[index];
            let used = length.div_ceil(page_tokens);
            let there = |page: &i32| usize::try_from(*page).is_ok_and(|page| page < pages);
            if (length > 0 && count > length) || used > width || !tables[index * width..][..used].iter().all(there) {
                return Err(wrong());
            }
            sequences.push(Sequence { row: rows[index], count, length });
        }
        if rows[0] != 0 || window == Some(0) || group == 0 {
            return Err(wrong());
        }
        Ok(Self(Plan::new(&sequences, tables, width, window, group, (pages, page_tokens))))
    }
}

/// Kernels on some threads, at one level.
#[pyclass(frozen, module = "pyengine._native")]
pub struct CpuKernels {
    threads: Py<LinearThreads>,
    level: Level,
}

#[pymethods]
impl CpuKernels {
    #[new]
    #[pyo3(signature = (threads, level=None))]
    fn new(threads: Py<LinearThreads>, level: Option<&str>) -> PyResult<Self> {
        Ok(Self { threads, level: level.map_or_else(|| Ok(Level::best()), find)? })
    }

    #[expect(clippy::too_many_arguments, reason = "four tensors, as numbers")]
    fn rms_norm(
        &self,
        py: Python<'_>,
        x: Matrix,
        residual: Matrix,
        weight: usize,
        out: Matrix,
        rows: usize,
        width: usize,
        eps: f32,
        half: bool,
    ) -> PyResult<()> {
        fn compute<T: Number>(
            this: &CpuKernels,
            py: Python<'_>,
            (x, residual, weight, out): (Matrix, Matrix, usize, Matrix),
            (rows, width, eps): (usize, usize, f32),
        ) -> PyResult<()> {
            let norm = RmsNorm::<T> {
                x: (x.0 as *const T, x.1),
                residual: (residual.0 as *mut T, residual.1),
                weight: weight as *const T,
                out: (out.0 as *mut T, out.1),
                rows,
                width,
                eps,
            };
            // SAFETY: the stub's contract: the caller owns the memory, which is as large as is said, and nobody else uses it.
            this.run(py, |threads, level| unsafe { norm.compute(threads, level) })
        }
        let (tensors, sizes) = ((x, residual, weight, out), (rows, width, eps));
        if half { compute::<Bf16>(self, py, tensors, sizes) } else { compute::<f32>(self, py, tensors, sizes) }
    }

    #[pyo3(signature = (qkv, tokens, heads, pages, cosines, sines, slots, norms, half, half_pages))]
    #[expect(clippy::too_many_arguments, reason = "seven tensors, as numbers")]
    fn rope_write(
        &self,
        py: Python<'_>,
        qkv: Heads,
        tokens: usize,
        heads: usize,
        pages: PageTensor,
        cosines: Matrix,
        sines: Matrix,
        slots: usize,
        norms: Option<(usize, usize, f32)>,
        half: bool,
        half_pages: bool,
    ) -> PyResult<()> {
        #[expect(clippy::too_many_arguments, reason = "as above")]
        fn compute<T: Number, C: Number>(
            this: &CpuKernels,
            py: Python<'_>,
            qkv: Heads,
            (tokens, heads): (usize, usize),
            pages: PageTensor,
            (cosines, sines): (Matrix, Matrix),
            slots: usize,
            norms: Option<(usize, usize, f32)>,
        ) -> PyResult<()> {
            let step = Rope::<T, C> {
                qkv: (qkv.0 as *mut T, qkv.1, qkv.2),
                tokens,
                heads,
                pages: tensor(pages)?,
                cosines: (cosines.0 as *const f32, cosines.1),
                sines: (sines.0 as *const f32, sines.1),
                slots: slots as *const i64,
                norms: norms.map(|(query, key, eps)| Norms { query: query as *const T, key: key as *const T, eps }),
            };
            // SAFETY: as in `rms_norm`.
            this.run(py, |threads, level| unsafe { step.compute(threads, level) })
        }
        typed!(half, half_pages, compute(self, py, qkv, (tokens, heads), pages, (cosines, sines), slots, norms))
    }

    fn swiglu(&self, py: Python<'_>, gate_up: Matrix, rows: usize, width: usize, half: bool) -> PyResult<()> {
        fn compute<T: Number>(
            this: &CpuKernels,
            py: Python<'_>,
            gate_up: Matrix,
            (rows, width): (usize, usize),
        ) -> PyResult<()> {
            let out = (gate_up.0 as *mut T, gate_up.1);
            let step = Swiglu::<T> { gate_up: (out.0.cast_const(), out.1), out, rows, width };
            // SAFETY: as in `rms_norm`.
            this.run(py, |threads, level| unsafe { step.compute(threads, level) })
        }
        let sizes = (rows, width);
        if half { compute::<Bf16>(self, py, gate_up, sizes) } else { compute::<f32>(self, py, gate_up, sizes) }
    }

    #[expect(clippy::too_many_arguments, reason = "three tensors, as numbers")]
    fn attend(
        &self,
        py: Python<'_>,
        plan: &AttentionPlan,
        query: Heads,
        out: Heads,
        rows: usize,
        pages: PageTensor,
        half: bool,
        half_pages: bool,
    ) -> PyResult<()> {
        fn compute<T: Number, C: Number>(
            this: &CpuKernels,
            py: Python<'_>,
            plan: &Plan,
            (query, out, rows): (Heads, Heads, usize),
            pages: PageTensor,
        ) -> PyResult<()> {
            let step = Attention::<T, C> {
                query: (query.0 as *const T, query.1, query.2),
                out: (out.0 as *mut T, out.1, out.2),
                rows,
                pages: tensor(pages)?,
            };
            if !plan.fits(&step.pages, rows) {
                return Err(bug("attention was planned for other pages, or for more rows"));
            }
            // SAFETY: as in `rms_norm`.
            this.run(py, |threads, level| unsafe { step.compute(plan, threads, level) })
        }
        typed!(half, half_pages, compute(self, py, &plan.0, (query, out, rows), pages))
    }

    #[expect(clippy::too_many_arguments, reason = "two tensors, as numbers")]
    fn copy_pages(
        &self,
        py: Python<'_>,
        pages: usize,
        page_ways: [usize; 5],
        strips: usize,
        strip_ways: [usize; 5],
        shape: (usize, usize, usize, usize),
        page_ids: Vec<i64>,
        scatter: bool,
    ) -> PyResult<()> {
        let (layers, heads, page_tokens, bytes) = shape;
        let step = Strips {
            pages: pages as *mut u8,
            page_ways,
            strips: strips as *mut u8,
            strip_ways,
            layers,
            heads,
            page_tokens,
            bytes,
        };
        if page_ids.iter().any(|page| *page < 0) {
            return Err(bug("a page below 0"));
        }
        let way = if scatter { Copied::Scattered } else { Copied::Gathered };
        // SAFETY: as in `rms_norm`.
        self.run(py, |threads, _| unsafe { step.copy(&page_ids, threads, way) })
    }
}

impl CpuKernels {
    fn run(&self, py: Python<'_>, work: impl FnOnce(&kernels::Threads, Level) + Send) -> PyResult<()> {
        self.threads.get().living.with(py, |threads| work(threads, self.level))
    }
}

fn tensor<T>((first, ways, counts): PageTensor) -> PyResult<Pages<T>> {
    let ([values, head, page, token], [heads, count, page_tokens, head_dim]) = (ways, counts);
    if head_dim > kernels::WIDEST_HEAD || !head_dim.is_multiple_of(2) || page_tokens == 0 {
        return Err(bug(format!("heads of {head_dim} numbers, pages of {page_tokens} tokens")));
    }
    Ok(Pages { first: first as *mut T, values, head, page, token, heads, count, page_tokens, head_dim })
}
