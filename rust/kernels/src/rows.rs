//! What is done to each token's row by itself: norm, rotation, activation.

use linear::lanes::Lanes;
use linear::{Level, Threads};

use crate::WIDEST_HEAD;
use crate::attention::Pages;
use crate::levels::compiled;
use crate::numbers::{LANES, Number, exp, total};

/// Numbers that are dealt with sooner by one thread than shared out: some 5 us of work.
const ALONE: usize = 16 << 10;

/// Calls `work(first, last)` for rows in shares of at least ALONE numbers.
fn shared_out(rows: usize, width: usize, threads: &Threads, work: &(dyn Fn(usize, usize) + Sync)) {
    let parts = (rows * width / ALONE).clamp(1, 4 * threads.count()).min(rows.max(1));
    threads.run(parts, &|part| work(part * rows / parts, (part + 1) * rows / parts));
}

/// A norm of rows.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<T> {
    /// \[rows\]\[width\], and the way from row to row.
    pub x: (*const T, usize),
    /// Added to x, and then holds the sum; null: there is none.
    pub residual: (*mut T, usize),
    /// \[width\].
    pub weight: *const T,
    /// Where the norm goes; may be where x is.
    pub out: (*mut T, usize),
    /// Rows.
    pub rows: usize,
    /// Numbers of each.
    pub width: usize,
    /// Added to the mean of squares.
    pub eps: f32,
}

// SAFETY: each row is one thread's alone.
unsafe impl<T: Sync> Sync for RmsNorm<T> {}

impl<T: Number> RmsNorm<T> {
    /// Computes it.
    ///
    /// # Safety
    ///
    /// The memory is there and nobody else touches it meanwhile; rows do not overlap; the processor has the level.
    pub unsafe fn compute(&self, threads: &Threads, level: Level) {
        shared_out(self.rows, self.width, threads, &|first, last| {
            // SAFETY: by the caller's promise; each row is dealt with once.
            unsafe { rms_norm(level, self, first, last) }
        });
    }
}

compiled!(unsafe fn rms_norm<T: Number>(norm: &RmsNorm<T>, first: usize, last: usize) = rms_norm_rows);

#[expect(clippy::extra_unused_type_parameters, reason = "`compiled!` names the level by it")]
#[inline(always)]
unsafe fn rms_norm_rows<V: Lanes, T: Number>(norm: &RmsNorm<T>, first: usize, last: usize) {
    let width = norm.width;
    for row in first..last {
        // SAFETY: by the promise of `RmsNorm::compute`. `out` may be x: each number is read before it is written.
        unsafe {
            let mut stream = norm.x.0.add(row * norm.x.1);
            if !norm.residual.0.is_null() {
                let residual = norm.residual.0.add(row * norm.residual.1);
                for column in 0..width {
                    let sum = (*residual.add(column)).widen() + (*stream.add(column)).widen();
                    *residual.add(column) = T::narrow(sum);
                }
                stream = residual;
            }
            let scale = inverse_rms(stream, width, norm.eps);
            let out = norm.out.0.add(row * norm.out.1);
            for column in 0..width {
                let number = (*stream.add(column)).widen() * scale * (*norm.weight.add(column)).widen();
                *out.add(column) = T::narrow(number);
            }
        }
    }
}

/// 1 / sqrt(mean of squares + eps).
///
/// # Safety
///
/// `width` numbers can be read.
#[inline(always)]
unsafe fn inverse_rms<T: Number>(row: *const T, width: usize, eps: f32) -> f32 {
    let mut sums = [0.0; LANES];
    // SAFETY: by the caller's promise.
    unsafe {
        for chunk in 0..width / LANES {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let number = (*row.add(chunk * LANES + lane)).widen();
                *sum = number.mul_add(number, *sum);
            }
        }
        let rest = width / LANES * LANES;
        for (lane, sum) in sums.iter_mut().take(width - rest).enumerate() {
            let number = (*row.add(rest + lane)).widen();
            *sum = number.mul_add(number, *sum);
        }
    }
    1.0 / (total(sums) / width as f32 + eps).sqrt()
}

/// SiLU(gate) * up.
#[derive(Clone, Copy, Debug)]
pub struct Swiglu<T> {
    /// \[rows\]\[2 * width\], gate before up, and the way from row to row.
    pub gate_up: (*const T, usize),
    /// Where the result goes, \[rows\]\[width\]; may be where the gate is.
    pub out: (*mut T, usize),
    /// Rows.
    pub rows: usize,
    /// Numbers of the gate.
    pub width: usize,
}

// SAFETY: each row is one thread's alone.
unsafe impl<T: Sync> Sync for Swiglu<T> {}

impl<T: Number> Swiglu<T> {
    /// Computes it.
    ///
    /// # Safety
    ///
    /// As for `RmsNorm::compute`.
    pub unsafe fn compute(&self, threads: &Threads, level: Level) {
        shared_out(self.rows, 2 * self.width, threads, &|first, last| {
            // SAFETY: as there.
            unsafe { swiglu(level, self, first, last) }
        });
    }
}

compiled!(unsafe fn swiglu<T: Number>(step: &Swiglu<T>, first: usize, last: usize) = swiglu_rows);

#[expect(clippy::extra_unused_type_parameters, reason = "`compiled!` names the level by it")]
#[inline(always)]
unsafe fn swiglu_rows<V: Lanes, T: Number>(step: &Swiglu<T>, first: usize, last: usize) {
    for row in first..last {
        // SAFETY: by the promise of `Swiglu::compute`; both halves are the row's, and `out` is elsewhere or the gate.
        let (gate, up) = unsafe {
            let gate = step.gate_up.0.add(row * step.gate_up.1);
            let out = step.out.0.add(row * step.out.1);
            if out.cast_const() != gate {
                out.copy_from_nonoverlapping(gate, step.width);
            }
            let up = std::slice::from_raw_parts(gate.add(step.width), step.width);
            (std::slice::from_raw_parts_mut(out, step.width), up)
        };
        for (gate, up) in gate.iter_mut().zip(up) {
            let number = gate.widen();
            *gate = T::narrow(number / (1.0 + exp(-number)) * up.widen());
        }
    }
}

/// Norms of single heads, before they are rotated.
#[derive(Clone, Copy, Debug)]
pub struct Norms<T> {
    /// Of queries: \[head_dim\].
    pub query: *const T,
    /// Of keys: \[head_dim\].
    pub key: *const T,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Queries and keys rotated, keys and values written into pages. Queries stay where they are.
#[derive(Clone, Copy, Debug)]
pub struct Rope<T, C> {
    /// \[tokens\]\[heads + 2 * KV heads\]\[head_dim\], and the ways from token to token and from head to head.
    pub qkv: (*mut T, usize, usize),
    /// Tokens.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Where KV goes.
    pub pages: Pages<C>,
    /// \[tokens\]\[head_dim / 2\], and the way from token to token.
    pub cosines: (*const f32, usize),
    /// The same.
    pub sines: (*const f32, usize),
    /// \[tokens\]: where each one's KV goes, -1: nowhere.
    pub slots: *const i64,
    /// What is done to heads before.
    pub norms: Option<Norms<T>>,
}

// SAFETY: each token is one thread's alone, and no two have the same slot.
unsafe impl<T: Sync, C: Sync> Sync for Rope<T, C> {}

impl<T: Number, C: Number> Rope<T, C> {
    /// Computes it. Panics if a slot is beyond the pages, or heads are too wide.
    ///
    /// # Safety
    ///
    /// As for `RmsNorm::compute`.
    pub unsafe fn compute(&self, threads: &Threads, level: Level) {
        assert!(self.pages.head_dim <= WIDEST_HEAD && self.pages.head_dim.is_multiple_of(2));
        let width = (self.heads + 2 * self.pages.heads) * self.pages.head_dim;
        shared_out(self.tokens, width, threads, &|first, last| {
            // SAFETY: as there.
            unsafe { rope(level, self, first, last) }
        });
    }
}

compiled!(unsafe fn rope<T: Number, C: Number>(step: &Rope<T, C>, first: usize, last: usize) = rope_rows);

#[expect(clippy::extra_unused_type_parameters, reason = "`compiled!` names the level by it")]
#[inline(always)]
unsafe fn rope_rows<V: Lanes, T: Number, C: Number>(step: &Rope<T, C>, first: usize, last: usize) {
    let (heads, pages, width) = (step.heads, &step.pages, step.pages.head_dim);
    let mut head = [0.0_f32; WIDEST_HEAD];
    for token in first..last {
        // SAFETY: by the promise of `Rope::compute`; `at` panics where there is no such slot.
        unsafe {
            let cosines = std::slice::from_raw_parts(step.cosines.0.add(token * step.cosines.1), width / 2);
            let sines = std::slice::from_raw_parts(step.sines.0.add(token * step.sines.1), width / 2);
            let row = step.qkv.0.add(token * step.qkv.1);
            let slot = usize::try_from(*step.slots.add(token)).ok();
            for index in 0..heads + pages.heads {
                let from = row.add(index * step.qkv.2);
                let query = index < heads;
                let scale = step
                    .norms
                    .map(|norms| (inverse_rms(from, width, norms.eps), if query { norms.query } else { norms.key }));
                for (column, to) in head[..width].iter_mut().enumerate() {
                    let number = (*from.add(column)).widen();
                    *to = match scale {
                        None => number,
                        Some((scale, weight)) => T::narrow(number * scale * (*weight.add(column)).widen()).widen(),
                    };
                }
                if query {
                    turn(&head[..width], cosines, sines, from);
                } else if let Some(slot) = slot {
                    turn(&head[..width], cosines, sines, pages.at(0, index - heads, slot));
                }
            }
            let Some(slot) = slot else { continue };
            for index in 0..pages.heads {
                let from = row.add((heads + pages.heads + index) * step.qkv.2);
                let to = pages.at(1, index, slot);
                for column in 0..width {
                    *to.add(column) = C::narrow((*from.add(column)).widen());
                }
            }
        }
    }
}

/// Turns dimensions i, i + half.
///
/// # Safety
///
/// As many numbers can be written as the head has.
#[inline(always)]
unsafe fn turn<T: Number>(head: &[f32], cosines: &[f32], sines: &[f32], to: *mut T) {
    let half = head.len() / 2;
    for index in 0..half {
        let (first, second) = (head[index], head[half + index]);
        let (cosine, sine) = (cosines[index], sines[index]);
        // SAFETY: by the caller's promise.
        unsafe {
            *to.add(index) = T::narrow(first.mul_add(cosine, -(second * sine)));
            *to.add(half + index) = T::narrow(second.mul_add(cosine, first * sine));
        }
    }
}
