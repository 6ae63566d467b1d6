//! Attention over pages: any number of new tokens of each sequence, causal, over the KV of all tokens before.
//!
//! # How it is computed
//!
//! Some new tokens of a sequence, times the query heads that share a KV head, are the rows of a **block**. The sequence's
//! positions are cut into segments of [`SEGMENT`], from position 0 on. For each segment that a block sees its keys are packed
//! (32 side by side for each dimension) and its values (32 dimensions side by side for each key), so that scores and weighted
//! sums are products of a tile of rows with panels (`tile.rs`). Of each segment a row has a largest score, a sum of weights,
//! and a weighted sum of values, all from zero; they are merged in the order of segments (Dao et al., FlashAttention-2, 2023,
//! with segments whose borders do not depend on the batch).
//!
//! So a row's bits depend on its query and on the KV that it sees, whether it is one of a decode step, of a whole prompt or
//! of a chunk. Where there are few blocks (decode of a few long sequences) threads share the segments of a block, and what
//! they found is merged by the same function in the same order.
//!
//! What is not seen is not read: beyond a sequence's tokens there may be NaN.

use std::cell::RefCell;

use linear::{Level, Shared, Threads};

use crate::WIDEST_HEAD;
use crate::levels::compiled;
use crate::numbers::{LANES, Number, exp, larger, total};
use crate::tile::{PANEL, ROWS, STRIDE, Tiled};

/// Positions that are merged at once: of keys and values with 64 dimensions 64 KiB each, which stay in the second cache
/// while a block's rows pass by. **Part of what a result means, so the same on all machines.**
pub const SEGMENT: usize = 256;
/// Rows of a block at most: so many share the packing of a segment.
const BLOCK: usize = 192;
/// Keys between the one that is packed and the one that memory is asked for: 4 KiB of keys with 64 dimensions, some 200 ns at
/// the speed of one core. 8, 12, 32 and 64 were slower.
const AHEAD: usize = 16;
/// Numbers that the parts of blocks may take until they are merged, 16 MiB.
const PARTIAL: usize = 4 << 20;
/// Blocks for each thread from which on each block is one thread's: they are even enough then.
const ENOUGH: usize = 4;

/// One layer's pages: [k, v\]\[heads\]\[pages\]\[page_tokens\]\[head_dim\], with the way from one to the next of each.
#[derive(Clone, Copy, Debug)]
pub struct Pages<T> {
    /// The first number.
    pub first: *mut T,
    /// From keys to values.
    pub values: usize,
    /// From head to head.
    pub head: usize,
    /// From page to page.
    pub page: usize,
    /// From token to token.
    pub token: usize,
    /// KV heads.
    pub heads: usize,
    /// Pages that there are.
    pub count: usize,
    /// Tokens of each.
    pub page_tokens: usize,
    /// Numbers of each token and head.
    pub head_dim: usize,
}

impl<T> Pages<T> {
    /// Where a token's key (0) or value (1) lies. Panics if there is no such slot.
    #[inline(always)]
    pub(crate) fn at(&self, value: usize, head: usize, slot: usize) -> *mut T {
        let (page, token) = (slot / self.page_tokens, slot % self.page_tokens);
        assert!(page < self.count, "slot {slot} is in none of {} pages", self.count);
        self.first.wrapping_add(value * self.values + head * self.head + page * self.page + token * self.token)
    }
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    /// The first one's row of the query.
    pub row: usize,
    /// How many.
    pub count: usize,
    /// Tokens of the sequence, these included; 0: it is not there, and its rows become zero.
    pub length: usize,
}

/// Some new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
struct Block {
    sequence: usize,
    /// Row of the first in the query.
    row: usize,
    tokens: usize,
    /// Position of the first.
    position: usize,
    /// Segments that any of them sees: from the first on, so many.
    segment: usize,
    segments: usize,
}

/// What is the same for all layers of a step.
#[derive(Debug)]
pub struct Plan {
    tables: Vec<i32>,
    width: usize,
    window: usize,
    group: usize,
    pages: usize,
    page_tokens: usize,
    blocks: Vec<Block>,
    /// Block and segment of each part, if blocks are cut.
    cut: Vec<(usize, usize)>,
    /// Rows that are to be zero: first, last.
    blank: Vec<(usize, usize)>,
    /// Rows behind the last sequence's begin here.
    end: usize,
}

impl Plan {
    /// sequences: one after the other; tables: \[sequences\]\[width\], each one's pages; window: how many positions a token
    /// sees, or none; group: query heads for each KV head; pages, page_tokens: those of the layers.
    ///
    /// Panics if a table is too narrow or names a page that does not exist, or if sequences are not one after the other.
    pub fn new(
        sequences: &[Sequence],
        tables: Vec<i32>,
        width: usize,
        window: Option<usize>,
        group: usize,
        (pages, page_tokens): (usize, usize),
    ) -> Self {
        assert!(group <= BLOCK, "{group} query heads for each KV head");
        assert_eq!(tables.len(), sequences.len() * width);
        let mut plan = Self {
            tables,
            width,
            window: window.unwrap_or(usize::MAX),
            group,
            pages,
            page_tokens,
            blocks: Vec::new(),
            cut: Vec::new(),
            blank: Vec::new(),
            end: 0,
        };
        let most = BLOCK / group.max(1);
        for (index, sequence) in sequences.iter().enumerate() {
            assert_eq!(sequence.row, plan.end, "sequences are one after the other");
            plan.end += sequence.count;
            if sequence.length == 0 {
                plan.blank.push((sequence.row, plan.end));
                continue;
            }
            assert!(sequence.count <= sequence.length);
            let used = sequence.length.div_ceil(page_tokens);
            let named = &plan.tables[index * width..][..used];
            assert!(named.iter().all(|page| usize::try_from(*page).is_ok_and(|page| page < pages)));
            let start = sequence.length - sequence.count;
            // Even blocks: the last is no remainder.
            let blocks = sequence.count.div_ceil(most);
            for block in 0..blocks {
                let (first, last) = (block * sequence.count / blocks, (block + 1) * sequence.count / blocks);
                let seen = plan.seen(start + first).0 / SEGMENT;
                plan.blocks.push(Block {
                    sequence: index,
                    row: sequence.row + first,
                    tokens: last - first,
                    position: start + first,
                    segment: seen,
                    segments: (start + last).div_ceil(SEGMENT) - seen,
                });
            }
        }
        for (index, block) in plan.blocks.iter().enumerate() {
            plan.cut.extend((block.segment..block.segment + block.segments).map(|segment| (index, segment)));
        }
        plan
    }

    /// Whether it was made for such pages, and for no more rows.
    pub fn fits<T>(&self, pages: &Pages<T>, rows: usize) -> bool {
        pages.page_tokens == self.page_tokens && pages.count >= self.pages && self.end <= rows
    }

    /// Positions that the token at a position sees: from .. before.
    #[inline(always)]
    fn seen(&self, position: usize) -> (usize, usize) {
        ((position + 1).saturating_sub(self.window), position + 1)
    }
}

/// One layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<T, C> {
    /// \[rows\]\[heads\]\[head_dim\], and the ways from row to row and from head to head.
    pub query: (*const T, usize, usize),
    /// The same; may be where the query is.
    pub out: (*mut T, usize, usize),
    /// Rows of the query.
    pub rows: usize,
    /// What is attended to.
    pub pages: Pages<C>,
}

// SAFETY: pages and queries are only read, and each part writes its own rows and heads.
unsafe impl<T: Sync, C: Sync> Sync for Attention<T, C> {}

thread_local! {
    /// What a part needs while it is computed, and what the caller keeps of parts until they are merged.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static PARTIALS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl<T: Number, C: Number> Attention<T, C> {
    /// Computes it. Panics if the plan is not for these pages and rows.
    ///
    /// # Safety
    ///
    /// The memory is there, nobody changes it and nobody else looks at `out` meanwhile; the processor has the level.
    pub unsafe fn compute(&self, plan: &Plan, threads: &Threads, level: Level) {
        let pages = &self.pages;
        assert!(pages.head_dim <= WIDEST_HEAD, "heads of {} numbers", pages.head_dim);
        assert!(plan.fits(pages, self.rows), "planned for other pages, or for more rows");
        for &(first, last) in plan.blank.iter().chain(&[(plan.end, self.rows)]) {
            for row in first..last {
                for head in 0..pages.heads * plan.group {
                    for column in 0..pages.head_dim {
                        // SAFETY: `out` has these rows, by the caller's promise.
                        unsafe { *self.out(row, head).add(column) = T::narrow(0.0) };
                    }
                }
            }
        }
        let heads = pages.heads;
        let whole = plan.blocks.len() * heads;
        let rows = plan.blocks.iter().map(|block| block.tokens * plan.group).max().unwrap_or(0);
        let partial = Partial::numbers(rows);
        let needed = plan.cut.len() * heads * partial;
        if whole >= ENOUGH * threads.count() || plan.cut.len() == plan.blocks.len() || needed > PARTIAL {
            threads.run(whole, &|part| {
                let (block, head) = (&plan.blocks[part / heads], part % heads);
                // SAFETY: by the caller's promise; each part has its own rows and heads.
                Memory::with(|memory| unsafe { whole_block(level, self, plan, block, head, memory) });
            });
            return;
        }
        PARTIALS.with_borrow_mut(|partials| {
            if partials.len() < needed {
                partials.resize(needed, 0.0);
            }
            let partials = Shared::new(partials.as_mut_ptr());
            threads.run(plan.cut.len() * heads, &|part| {
                let ((block, segment), head) = (plan.cut[part / heads], part % heads);
                let block = &plan.blocks[block];
                // SAFETY: as above; each part has its own numbers of those that were just made sure of.
                Memory::with(|memory| unsafe {
                    one_segment(level, self, plan, (block, head), segment, partials.at(part * partial), memory);
                });
            });
            let mut first = 0;
            for block in &plan.blocks {
                for head in 0..heads {
                    let part = |segment: usize| partials.at(((first + segment) * heads + head) * partial);
                    // SAFETY: as above; all parts are done.
                    Memory::with(|memory| unsafe { merged(level, self, plan, block, head, &part, memory) });
                }
                first += block.segments;
            }
        });
    }

    #[inline(always)]
    fn out(&self, row: usize, head: usize) -> *mut T {
        self.out.0.wrapping_add(row * self.out.1 + head * self.out.2)
    }
}

/// Memory of a thread while it computes a part.
struct Memory {
    /// Of the block's rows: queries, \[BLOCK\]\[STRIDE\].
    queries: *mut f32,
    /// Of a tile: scores, then weights, \[ROWS\]\[STRIDE\].
    scores: *mut f32,
    /// \[SEGMENT / PANEL\]\[head_dim\]\[PANEL\].
    keys: *mut f32,
    /// One panel's keys as they come: \[PANEL\]\[STRIDE\].
    rows: *mut f32,
    /// \[head_dim / PANEL, up\]\[SEGMENT\]\[PANEL\].
    values: *mut f32,
    /// What the block's rows have found so far.
    found: *mut f32,
    /// What a tile's rows have found in this segment.
    here: *mut f32,
}

const _: () = assert!(SEGMENT <= STRIDE && SEGMENT.is_multiple_of(PANEL) && WIDEST_HEAD.is_multiple_of(PANEL));

/// What some rows have found: the weighted sum of values [rows\]\[STRIDE\], then each one's largest score, then the sums of
/// weights.
#[derive(Clone, Copy)]
struct Partial {
    first: *mut f32,
    rows: usize,
}

impl Partial {
    const fn numbers(rows: usize) -> usize {
        rows * (STRIDE + 2)
    }

    #[inline(always)]
    fn sum(self, row: usize) -> *mut f32 {
        self.first.wrapping_add(row * STRIDE)
    }

    #[inline(always)]
    fn largest(self, row: usize) -> *mut f32 {
        self.first.wrapping_add(self.rows * STRIDE + row)
    }

    #[inline(always)]
    fn weight(self, row: usize) -> *mut f32 {
        self.first.wrapping_add(self.rows * (STRIDE + 1) + row)
    }

    /// Nothing yet: no weight.
    ///
    /// # Safety
    ///
    /// There are numbers for so many rows, here and below.
    #[inline(always)]
    unsafe fn clear(self, width: usize) {
        for row in 0..self.rows {
            // SAFETY: by the caller's promise.
            unsafe {
                self.sum(row).write_bytes(0, width);
                *self.largest(row) = f32::NEG_INFINITY;
                *self.weight(row) = 0.0;
            }
        }
    }

    /// Adds what a row of another has found to one of this.
    #[inline(always)]
    unsafe fn merge(self, row: usize, other: Partial, from: usize, width: usize) {
        // SAFETY: by the caller's promise.
        unsafe {
            let (before, here) = (*self.largest(row), *other.largest(from));
            let most = larger(before, here);
            let (before, here) = (exp(before - most), exp(here - most));
            *self.largest(row) = most;
            *self.weight(row) = (*self.weight(row)).mul_add(before, *other.weight(from) * here);
            let (sum, add) = (self.sum(row), other.sum(from));
            for column in 0..width {
                *sum.add(column) = (*sum.add(column)).mul_add(before, *add.add(column) * here);
            }
        }
    }
}

impl Memory {
    const NUMBERS: usize =
        (BLOCK + ROWS + PANEL) * STRIDE + 2 * SEGMENT * WIDEST_HEAD + Partial::numbers(BLOCK) + Partial::numbers(ROWS);

    /// The thread's own, for the time of a call. Whoever computes is called from within: code that stands in a closure is
    /// not compiled for a level.
    fn with(work: impl FnOnce(&Memory)) {
        SCRATCH.with_borrow_mut(|scratch| {
            // Nothing is computed from the zeros, and of what is not used the system has no pages.
            if scratch.is_empty() {
                *scratch = vec![0.0; Self::NUMBERS + 16];
            }
            let mut next = scratch.as_mut_ptr();
            // On a cache line: panels are read by whole ones.
            next = next.wrapping_add(next.align_offset(64).min(16));
            let mut take = |numbers: usize| {
                let taken = next;
                next = next.wrapping_add(numbers);
                taken
            };
            work(&Memory {
                keys: take(SEGMENT * WIDEST_HEAD),
                values: take(SEGMENT * WIDEST_HEAD),
                queries: take(BLOCK * STRIDE),
                scores: take(ROWS * STRIDE),
                rows: take(PANEL * STRIDE),
                found: take(Partial::numbers(BLOCK)),
                here: take(Partial::numbers(ROWS)),
            });
        });
    }
}

compiled!(unsafe fn whole_block<T: Number, C: Number>(
    step: &Attention<T, C>, plan: &Plan, block: &Block, head: usize, memory: &Memory,
) = compute_whole);

#[inline(always)]
unsafe fn compute_whole<V: Tiled, T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    block: &Block,
    head: usize,
    memory: &Memory,
) {
    let found = Partial { first: memory.found, rows: block.tokens * plan.group };
    // SAFETY: by the promise of `Attention::compute`; the memory has room for a block.
    unsafe {
        found.clear(step.pages.head_dim);
        take_queries(step, plan, block, head, memory);
        for segment in block.segment..block.segment + block.segments {
            look::<V, T, C>(step, plan, block, head, segment, memory, found);
        }
        finish(step, plan, block, head, found);
    }
}

compiled!(unsafe fn one_segment<T: Number, C: Number>(
    step: &Attention<T, C>, plan: &Plan, place: (&Block, usize), segment: usize, to: *mut f32, memory: &Memory,
) = compute_one);

#[inline(always)]
unsafe fn compute_one<V: Tiled, T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    (block, head): (&Block, usize),
    segment: usize,
    to: *mut f32,
    memory: &Memory,
) {
    let found = Partial { first: to, rows: block.tokens * plan.group };
    // SAFETY: as in `compute_whole`; `to` has room for the block's rows.
    unsafe {
        found.clear(step.pages.head_dim);
        take_queries(step, plan, block, head, memory);
        look::<V, T, C>(step, plan, block, head, segment, memory, found);
    }
}

compiled!(unsafe fn merged<T: Number, C: Number>(
    step: &Attention<T, C>, plan: &Plan, block: &Block, head: usize, part: &dyn Fn(usize) -> *mut f32,
    memory: &Memory,
) = compute_merged);

#[inline(always)]
unsafe fn compute_merged<V: Tiled, T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    block: &Block,
    head: usize,
    part: &dyn Fn(usize) -> *mut f32,
    memory: &Memory,
) {
    let rows = block.tokens * plan.group;
    let found = Partial { first: memory.found, rows };
    // SAFETY: as in `compute_whole`; parts are those of this block, by segment.
    unsafe {
        found.clear(step.pages.head_dim);
        for segment in 0..block.segments {
            let other = Partial { first: part(segment), rows };
            for row in 0..rows {
                if *other.weight(row) != 0.0 {
                    found.merge(row, other, row, step.pages.head_dim);
                }
            }
        }
        finish(step, plan, block, head, found);
    }
}

/// The block's queries, scaled.
///
/// # Safety
///
/// As for `Attention::compute`, here and below.
#[inline(always)]
unsafe fn take_queries<T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    block: &Block,
    head: usize,
    memory: &Memory,
) {
    let scale = 1.0 / (step.pages.head_dim as f32).sqrt();
    for token in 0..block.tokens {
        for query in 0..plan.group {
            // SAFETY: by the caller's promise.
            unsafe {
                let from =
                    step.query.0.add((block.row + token) * step.query.1 + (head * plan.group + query) * step.query.2);
                let to = memory.queries.add((token * plan.group + query) * STRIDE);
                for column in 0..step.pages.head_dim {
                    *to.add(column) = (*from.add(column)).widen() * scale;
                }
            }
        }
    }
}

/// Divides by the weights and writes the block's rows.
#[inline(always)]
unsafe fn finish<T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    block: &Block,
    head: usize,
    found: Partial,
) {
    for row in 0..found.rows {
        // SAFETY: by the caller's promise.
        unsafe {
            let to = step.out(block.row + row / plan.group, head * plan.group + row % plan.group);
            let scale = 1.0 / *found.weight(row);
            for column in 0..step.pages.head_dim {
                *to.add(column) = T::narrow(*found.sum(row).add(column) * scale);
            }
        }
    }
}

/// What a block's rows find in one segment, merged into what they have found so far.
#[inline(always)]
unsafe fn look<V: Tiled, T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    block: &Block,
    head: usize,
    segment: usize,
    memory: &Memory,
    found: Partial,
) {
    let start = segment * SEGMENT;
    let width = step.pages.head_dim;
    // What a position sees of the segment, counted from its start.
    let seen = |position: usize| {
        let (first, last) = plan.seen(position);
        (first.clamp(start, start + SEGMENT) - start, last.clamp(start, start + SEGMENT) - start)
    };
    let (begin, _) = seen(block.position);
    let (_, end) = seen(block.position + block.tokens - 1);
    // SAFETY: by the caller's promise; the memory has room for a segment and a block.
    unsafe {
        pack::<V, T, C>(step, plan, block.sequence, head, start, (begin, end), memory);
        let mut first = 0;
        while first < found.rows {
            let rows = V::TILES.len().min(found.rows - first);
            let position = |row: usize| block.position + (first + row) / plan.group;
            let (begin, end) = (seen(position(0)).0, seen(position(rows - 1)).1);
            if begin < end {
                let panels = begin / PANEL..end.div_ceil(PANEL);
                for panel in panels.clone() {
                    V::TILES[rows - 1](
                        memory.queries.add(first * STRIDE),
                        memory.keys.add(panel * width * PANEL),
                        width,
                        memory.scores.add(panel * PANEL),
                    );
                }
                let here = Partial { first: memory.here, rows: ROWS };
                let (left, right) = (panels.start * PANEL, panels.end * PANEL);
                for row in 0..rows {
                    let scores = std::slice::from_raw_parts_mut(memory.scores.add(row * STRIDE), right);
                    let (largest, weight) = weigh(&mut scores[left..], left, seen(position(row)));
                    (*here.largest(row), *here.weight(row)) = (largest, weight);
                }
                for panel in 0..width.div_ceil(PANEL) {
                    V::TILES[rows - 1](
                        memory.scores.add(left),
                        memory.values.add((panel * SEGMENT + left) * PANEL),
                        right - left,
                        here.first.add(panel * PANEL),
                    );
                }
                for row in 0..rows {
                    let (begin, end) = seen(position(row));
                    if begin < end {
                        found.merge(first + row, here, row, width);
                    }
                }
            }
            first += rows;
        }
    }
}

/// Scores become weights, 0 where nothing is seen. Returns the largest score and the sum of the weights.
///
/// scores: whole panels from `left` on; (begin, end): what is seen, counted from the segment's start.
#[inline(always)]
fn weigh(scores: &mut [f32], left: usize, (begin, end): (usize, usize)) -> (f32, f32) {
    let (begin, end) = (begin.max(left) - left, end.max(left) - left);
    let count = scores.len();
    scores[..begin.min(count)].fill(f32::NEG_INFINITY);
    scores[end.min(count)..].fill(f32::NEG_INFINITY);
    let (chunks, _) = scores.as_chunks_mut::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for chunk in chunks.iter() {
        for (most, score) in most.iter_mut().zip(chunk) {
            *most = larger(*score, *most);
        }
    }
    let largest = most.into_iter().fold(f32::NEG_INFINITY, |most, score| larger(score, most));
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            *score = exp(*score - largest);
            *sum += *score;
        }
    }
    (largest, total(sums))
}

/// Packs the keys and values begin..end of a segment; the panels that these touch are zero elsewhere.
#[inline(always)]
unsafe fn pack<V: Tiled, T: Number, C: Number>(
    step: &Attention<T, C>,
    plan: &Plan,
    sequence: usize,
    head: usize,
    start: usize,
    (begin, end): (usize, usize),
    memory: &Memory,
) {
    let (pages, width) = (&step.pages, step.pages.head_dim);
    let table = &plan.tables[sequence * plan.width..][..plan.width];
    let at = |value: usize, key: usize| {
        let position = start + key;
        let (page, token) = (table[position / plan.page_tokens] as usize, position % plan.page_tokens);
        pages.at(value, head, page * plan.page_tokens + token)
    };
    for panel in begin / PANEL..end.div_ceil(PANEL) {
        let keys = (panel * PANEL).max(begin)..((panel + 1) * PANEL).min(end);
        // SAFETY: by the caller's promise; the memory has room for a segment's panels, and `here` for one panel's rows.
        unsafe {
            let here = memory.rows;
            if keys.len() < PANEL {
                here.write_bytes(0, PANEL * STRIDE);
                for columns in 0..width.div_ceil(PANEL) {
                    memory.values.add((columns * SEGMENT + panel * PANEL) * PANEL).write_bytes(0, PANEL * PANEL);
                }
            }
            for key in keys.clone() {
                let (from, to) = (at(0, key), here.add(key % PANEL * STRIDE));
                ask_for::<V, C>(pages, (key + AHEAD < end).then(|| at(0, key + AHEAD)));
                for column in 0..width {
                    *to.add(column) = (*from.add(column)).widen();
                }
            }
            V::turn(here, width, memory.keys.add(panel * width * PANEL));
            for key in keys {
                let from = at(1, key);
                ask_for::<V, C>(pages, (key + AHEAD < end).then(|| at(1, key + AHEAD)));
                for columns in 0..width.div_ceil(PANEL) {
                    let from = from.add(columns * PANEL);
                    let to = memory.values.add((columns * SEGMENT + key) * PANEL);
                    for column in 0..PANEL.min(width - columns * PANEL) {
                        *to.add(column) = (*from.add(column)).widen();
                    }
                }
            }
        }
    }
}

/// Asks for a token's numbers: pages are too small for the processor to foresee the next.
#[inline(always)]
unsafe fn ask_for<V: Tiled, C: Number>(pages: &Pages<C>, token: Option<*mut C>) {
    let Some(token) = token else { return };
    for line in 0..(pages.head_dim * size_of::<C>()).div_ceil(64) {
        // SAFETY: the processor has the instruction; a prefetch may name any address.
        unsafe { V::prefetch(token.cast::<u8>().wrapping_add(line * 64).cast()) };
    }
}
