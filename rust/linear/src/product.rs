//! The product: cut into parts, each part into tiles.

use std::cell::RefCell;

use crate::kernel::{Level, Operands, Pair, Single, Tile};
use crate::matrix::{Rows, RowsMut};
use crate::panels::{CHUNK, Kind, PANEL, Packed};
use crate::shared::Shared;
use crate::threads::Threads;

/// Rows of a block: its share of `x` is read from the second cache for each panel, and the weights are read once per block.
/// At 576 columns 192 rows are 432 KiB; with more columns a block of less than 96 rows would need the weights too often.
const BLOCK_BYTES: usize = 448 << 10;
const BLOCK_ROWS: std::ops::RangeInclusive<usize> = 96..=256;
/// Packed numbers of `x` that a thread keeps at most: 16 MiB. More rows are computed one share after the other.
const PACKED: usize = 4 << 20;
/// Fewer numbers are packed sooner by one thread than by several.
const PACK_ALONE: usize = 32 << 10;
/// Numbers of a row that are packed before those of the next.
const PACK_DEPTH: usize = 64;
/// Tiles of a block that share in asking for the next weights.
const FEW: usize = 4;

thread_local! {
    /// The packed rows of the product that this thread has asked for.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// `out = x @ weights.T`.
///
/// Panics if the shapes do not fit, or if the processor has no such level.
pub fn multiply(weights: Packed<'_>, x: Rows<'_, f32>, mut out: RowsMut<'_, f32>, threads: &Threads, level: Level) {
    assert_eq!(x.width(), weights.depth(), "columns of x");
    assert_eq!(out.width(), weights.outputs(), "columns of the result");
    assert_eq!(out.count(), x.count(), "rows of the result");
    let tiles = match weights.kind() {
        Kind::F32 => level.tiles::<Single>(),
        Kind::Bf16 => level.tiles::<Pair>(),
    };
    if weights.outputs() == 0 {
        return;
    }
    let depth = weights.depth().next_multiple_of(weights.kind().per_lane());
    let most = (PACKED / depth.max(1)).max(tiles.len());
    SCRATCH.with_borrow_mut(|scratch| {
        let mut first = 0;
        while first < x.count() {
            let count = most.min(x.count() - first);
            let to = (out.at(first, 0), out.stride());
            Product { weights, x: x.some(first, count), to, depth, tiles }.compute(scratch, threads);
            first += count;
        }
    });
}

/// Some rows' product.
struct Product<'a> {
    weights: Packed<'a>,
    x: Rows<'a, f32>,
    /// First number of the result, and the way from row to row.
    to: (*mut f32, usize),
    /// With padding.
    depth: usize,
    tiles: &'static [[Tile; 2]],
}

// SAFETY: threads write distinct parts of the result.
unsafe impl Sync for Product<'_> {}

impl Product<'_> {
    fn compute(&self, scratch: &mut Vec<f32>, threads: &Threads) {
        let rows = self.x.count();
        // Rows are spread evenly: a tile of one row takes longer than its share.
        let tiles = rows.div_ceil(self.tiles.len());
        let cut = |tile: usize| tile * rows / tiles;
        let packed = if rows == 1 && self.depth == self.x.width() {
            self.x.row(0).as_ptr()
        } else {
            let needed = rows * self.depth;
            if scratch.len() < needed {
                scratch.resize(needed, 0.0);
            }
            let to = Shared::new(scratch.as_mut_ptr());
            let pack = |tile: usize| {
                let (first, last) = (cut(tile), cut(tile + 1));
                // SAFETY: each tile has its own numbers, [depth][rows of the tile], within those just made sure of.
                let to = unsafe {
                    let length = (last - first) * self.depth;
                    std::slice::from_raw_parts_mut(to.at(first * self.depth), length)
                };
                pack(self.x.some(first, last - first), to);
            };
            if needed <= PACK_ALONE {
                (0..tiles).for_each(pack)
            } else {
                threads.run(tiles, &pack)
            }
            scratch.as_ptr()
        };
        let packed = Shared::new(packed.cast_mut());
        let most = (BLOCK_BYTES / (4 * self.depth.max(1))).clamp(*BLOCK_ROWS.start(), *BLOCK_ROWS.end());
        // Tiles have at most as many rows as there are kernels.
        let blocks = tiles.div_ceil(most / self.tiles.len());
        let panels = self.weights.outputs().div_ceil(PANEL);
        threads.run(blocks * panels, &|part| {
            let (block, panel) = (part / panels, part % panels);
            let (first, last) = (block * tiles / blocks, (block + 1) * tiles / blocks);
            self.part(panel, (first..last).map(|tile| (cut(tile), cut(tile + 1))), packed.at(0));
        });
    }

    /// The columns of one panel in the rows of some tiles.
    fn part(&self, panel: usize, tiles: impl Iterator<Item = (usize, usize)> + Clone, packed: *const f32) {
        let (to, stride) = self.to;
        let column = panel * PANEL;
        let columns = PANEL.min(self.weights.outputs() - column);
        let (first, count) = (tiles.clone().next().map_or(0, |(first, _)| first), tiles.clone().count());
        // Sums of the chunks so far, and what is cut off the last panel. Nothing is read that was not written before.
        let mut sums = [const { std::mem::MaybeUninit::<f32>::uninit() }; 256 * PANEL];
        let sums = sums.as_mut_ptr().cast::<f32>();
        let chunks = self.depth.div_ceil(CHUNK).max(1);
        for chunk in 0..chunks {
            let depth = chunk * CHUNK;
            let steps = CHUNK.min(self.depth - depth) / self.weights.kind().per_lane();
            let mut cold = 1;
            // With one tile there is no time in which memory is not asked; with many there is enough in any case.
            let next_step = if (2..=FEW).contains(&count) { PANEL / count } else { 0 };
            for (index, (begin, end)) in tiles.clone().enumerate() {
                let rows = end - begin;
                // SAFETY: a block has no more rows than `sums`; packed rows are [depth][rows] for each tile; the result has
                // these rows and, if it is written to directly, all of the panel's columns. `tiles` gives kernels that
                // this processor can run.
                unsafe {
                    let sums = sums.add((begin - first) * PANEL);
                    let whole = chunk + 1 == chunks && columns == PANEL;
                    let operands = Operands {
                        weights: self.weights.panel(panel, depth),
                        x: packed.add(begin * self.depth + depth * rows),
                        steps,
                        before: if chunk == 0 { std::ptr::null() } else { sums },
                        to: if whole { to.add(begin * stride + column) } else { sums },
                        stride: if whole { stride } else { PANEL },
                        next: self.weights.panel(panel, depth).wrapping_add(steps * (PANEL + index * next_step)),
                        next_step,
                    };
                    self.tiles[rows - 1][cold](&operands);
                    if chunk + 1 == chunks && !whole {
                        for row in 0..rows {
                            let to = to.add((begin + row) * stride + column);
                            to.copy_from_nonoverlapping(sums.add(row * PANEL), columns);
                        }
                    }
                }
                cold = 0;
            }
        }
    }
}

/// Rows as a tile reads them: \[depth\]\[rows\], zeros behind the last.
fn pack(x: Rows<'_, f32>, to: &mut [f32]) {
    let (rows, width) = (x.count(), x.width());
    let (numbers, padding) = to.split_at_mut(width * rows);
    // Some cache lines of each row at a time, so that what is written stays in the first cache until it is complete.
    for (index, numbers) in numbers.chunks_mut(PACK_DEPTH * rows.max(1)).enumerate() {
        for row in 0..rows {
            let from = &x.row(row)[index * PACK_DEPTH..];
            for (to, number) in numbers.chunks_exact_mut(rows).zip(from) {
                to[row] = *number;
            }
        }
    }
    padding.fill(0.0);
}
