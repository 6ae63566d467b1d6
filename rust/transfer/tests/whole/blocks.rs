//! Which blocks there are, what is in them, and what a worker wants with them.

use pyengine_transfer::messages::GrantedSlot;
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Layout, NodeAddress, Tag};

/// A small one, and one of twice its memory.
pub const LAYOUTS: [Layout; 2] = [Layout { strips: 4, strip_bytes: 32 }, Layout { strips: 70, strip_bytes: 64 }];
pub const ROOT: BlockKey = BlockKey([0; 16]);
/// Namespaces of each layout, prefixes of each namespace, and blocks of the longest prompt.
const NAMESPACES: u64 = 2;
const PREFIXES: u64 = 4;
const POSITIONS: u64 = 6;

/// What a client makes: blocks of one layout in one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub layout: usize,
    pub namespace: u64,
}

/// All there are.
pub fn kinds() -> impl Iterator<Item = Kind> {
    (0..LAYOUTS.len()).flat_map(|layout| {
        (0..NAMESPACES).map(move |number| Kind { layout, namespace: 1 + layout as u64 * NAMESPACES + number })
    })
}

pub fn key(kind: Kind, prefix: u8, position: u8) -> BlockKey {
    let mut bytes = [0; 16];
    (bytes[0], bytes[1], bytes[2], bytes[3]) = (1 + kind.layout as u8, prefix, position, kind.namespace as u8);
    BlockKey(bytes)
}

/// Blocks of a prompt, from the head on.
pub fn prompt(kind: Kind, random: &mut Random) -> Vec<BlockKey> {
    let (prefix, length) = (random.below(PREFIXES) as u8, random.below(POSITIONS) as u8);
    (0..length).map(|position| key(kind, prefix, position)).collect()
}

/// All that prompts are made of.
pub fn all_prompts(kind: Kind) -> impl Iterator<Item = Vec<BlockKey>> {
    (0..PREFIXES as u8).map(move |prefix| (0..POSITIONS as u8).map(|position| key(kind, prefix, position)).collect())
}

/// For whom a prompt is computed: the same for all who ask for it.
/// The tenant whom some nodes allow less than all.
pub const LIMITED: u64 = 2;

pub fn tenant(keys: &[BlockKey]) -> u64 {
    keys.first().map_or(0, tenant_of)
}

pub fn tenant_of(key: &BlockKey) -> u64 {
    1 + u64::from(key.0[1])
}

pub fn namespace_of(key: &BlockKey) -> u64 {
    u64::from(key.0[3])
}

fn bytes_from(layout: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..LAYOUTS[layout].block_bytes()).map(|_| random.bits() as u8).collect()
}

/// The right bytes of a block: of its key, or, for a private one, of its tag.
pub fn content(layout: usize, keys: &[BlockKey], tag: Tag, index: u32) -> Vec<u8> {
    match keys.get(index as usize) {
        Some(BlockKey([_, prefix, position, namespace, ..])) => {
            bytes_from(layout, u64::from_le_bytes([*prefix, *position, *namespace, 0, 0, 0, 0, 0]))
        }
        None => bytes_from(layout, 1 << 40 | tag.request),
    }
}

pub fn note_of(tag: Tag) -> Vec<u8> {
    format!("note of {}", tag.request).into_bytes()
}

/// A worker's part in one tag. `keys` and `private` describe the grant.
#[derive(Clone, Debug)]
pub struct Task {
    pub keys: Vec<BlockKey>,
    pub private: bool,
    pub part: Part,
}

impl Task {
    /// Blocks of the grant.
    pub fn blocks(&self) -> usize {
        self.keys.len() + usize::from(self.private)
    }
}

#[derive(Clone, Debug)]
pub enum Part {
    /// Holds a grant.
    Holder { slots: Option<Vec<GrantedSlot>>, fill: Fill, complete: bool },
    /// Opens the grant of the tag at `to`, and pushes what it holds under `local`. strips: of each block, so far.
    Pusher { to: NodeAddress, local: Tag, opened: Option<(Vec<bool>, Vec<GrantedSlot>)>, strips: u32, pushed: bool },
    /// Has pinned blocks.
    Looker,
}

/// Who fills a grant.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Somebody pushes.
    Pushed,
    /// Its holder writes it.
    Own,
    /// Its holder writes it, some strips of all blocks after the other, and pushes each part before the next is written.
    Layers,
    /// It is fetched from there.
    Fetch(Vec<NodeAddress>),
}

impl Part {
    pub fn holder(fill: Fill) -> Self {
        Self::Holder { slots: None, fill, complete: false }
    }

    pub fn pusher(to: NodeAddress, local: Tag) -> Self {
        Self::Pusher { to, local, opened: None, strips: 0, pushed: false }
    }
}
