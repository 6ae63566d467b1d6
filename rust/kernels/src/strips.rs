//! Whole pages to canonical strips and back: bits are moved, nothing is computed.

use linear::Threads;

/// The pages of a range of layers and heads, and strips of as many blocks. All in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Strips {
    /// The range's first number.
    pub pages: *mut u8,
    /// The ways from layer to layer, from keys to values, from head to head, from page to page and from token to token.
    pub page_ways: [usize; 5],
    /// \[blocks\]\[layers\]\[k, v\]\[heads\]\[page_tokens\]\[head\].
    pub strips: *mut u8,
    /// The ways from block to block, from layer to layer, from keys to values, from head to head and from token to token.
    pub strip_ways: [usize; 5],
    /// Layers of the range.
    pub layers: usize,
    /// KV heads of the range.
    pub heads: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Bytes of one token and head.
    pub bytes: usize,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Pages to strips.
    Gathered,
    /// Strips to pages.
    Scattered,
}

// SAFETY: each block is one part's alone.
unsafe impl Sync for Strips {}

impl Strips {
    /// Copies the pages named to strips or from them.
    ///
    /// # Safety
    ///
    /// The pages and strips are there, no page is named twice, and nobody else touches them meanwhile.
    pub unsafe fn copy(&self, pages: &[i64], threads: &Threads, way: Copied) {
        threads.run(pages.len() * self.layers, &|part| {
            let (block, layer) = (part / self.layers, part % self.layers);
            let page = self.pages.wrapping_add(layer * self.page_ways[0] + pages[block] as usize * self.page_ways[3]);
            let strip = self.strips.wrapping_add(block * self.strip_ways[0] + layer * self.strip_ways[1]);
            let dense = self.page_ways[4] == self.bytes && self.strip_ways[4] == self.bytes;
            let (runs, bytes) = if dense { (1, self.page_tokens * self.bytes) } else { (self.page_tokens, self.bytes) };
            for value in 0..2 {
                for head in 0..self.heads {
                    for run in 0..runs {
                        let here = value * self.page_ways[1] + head * self.page_ways[2] + run * self.page_ways[4];
                        let there = value * self.strip_ways[2] + head * self.strip_ways[3] + run * self.strip_ways[4];
                        let (page, strip) = (page.wrapping_add(here), strip.wrapping_add(there));
                        // SAFETY: by the caller's promise.
                        unsafe {
                            match way {
                                Copied::Gathered => strip.copy_from_nonoverlapping(page, bytes),
                                Copied::Scattered => page.copy_from_nonoverlapping(strip, bytes),
                            }
                        }
                    }
                }
            }
        });
    }
}
