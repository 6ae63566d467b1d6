//! Registered memory as the cards know it.
//!
//! A card must pin what it touches, and pinning a page makes it memory. So a region is made known in chunks, each at its
//! first use and once per rail: an arena of 100 GiB costs nothing before it is filled, and no use waits for more than
//! one chunk (256 MiB: 0.1 s where the kernel clears 3 GB/s; well within the 3 s of a stall).
//!
//! A chunk of an arena is pinned whole, also the slots in it that its pool does not use: where several arenas share a
//! node's memory, up to a chunk of each may be taken besides.
//!
//! A removed region's chunks are forgotten within its removal. Whoever still moves bytes of it holds the chunk and,
//! longer, the region; so the keys are invalid before the memory is given back.

use std::collections::HashMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::region::{Access, Region, Regions};
use crate::types::{RegionId, Span};

use super::device::{Rail, Registration};
use super::slices::chunks;
use super::verbs::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE};

const CHUNK_BYTES: u64 = 256 << 20;

/// A part of a region that all rails know.
pub struct Chunk {
    /// One per rail.
    registrations: Vec<Registration>,
    /// NUMA node of its first page.
    pub node: Option<u32>,
    /// Keeps the memory mapped; dropped after the registrations.
    _region: Region,
}

impl Chunk {
    /// Opens it to this side's work requests on a rail.
    pub fn local_key(&self, rail: usize) -> u32 {
        self.registrations[rail].local_key
    }

    /// Opens it to the other side on a rail.
    pub fn remote_key(&self, rail: usize) -> u32 {
        self.registrations[rail].remote_key
    }
}

/// Bytes that lie in one chunk.
#[derive(Clone)]
pub struct Run {
    /// Where they lie, for the card as for this process.
    pub address: u64,
    /// How many.
    pub bytes: u32,
    /// What opens them.
    pub chunk: Arc<Chunk>,
}

/// By region and place in it; each behind a lock of its own, as pinning takes time.
type Chunks = HashMap<(RegionId, u64), Arc<Mutex<Option<Arc<Chunk>>>>>;

/// All that the rails know.
pub struct Pinned {
    rails: Arc<[Arc<Rail>]>,
    chunks: Mutex<Chunks>,
}

impl Pinned {
    /// Nothing yet.
    pub fn new(rails: Arc<[Arc<Rail>]>) -> Self {
        Self { rails, chunks: Mutex::default() }
    }

    /// The bytes of a hold: `pointer` is where they begin, `at` what was held. Pins what is not pinned yet. `None` if the
    /// region was removed meanwhile.
    ///
    /// # Errors
    /// Retry: the kernel does not pin so much.
    pub fn runs(
        &self,
        regions: &Regions,
        at: Span,
        pointer: NonNull<u8>,
        bytes: u32,
    ) -> Result<Option<Vec<Run>>, Error> {
        let mut runs = Vec::with_capacity(1);
        for (index, offset, bytes) in chunks(at.offset, bytes, CHUNK_BYTES) {
            let address = pointer.as_ptr() as u64 + (offset - at.offset);
            let base = address - (offset - index * CHUNK_BYTES);
            let Some(chunk) = self.chunk(regions, at.region, index, base)? else { return Ok(None) };
            runs.push(Run { address, bytes, chunk });
        }
        Ok(Some(runs))
    }

    /// Forgets the chunks that have any of these bytes of a region; they go with the last who uses them. Of memory that an
    /// arena has given back the cards would still know the old pages, so it is made known anew when it is used again.
    pub fn forget(&self, region: RegionId, bytes: Range<u64>) {
        let has = |chunk: u64| chunk * CHUNK_BYTES < bytes.end && bytes.start < (chunk + 1) * CHUNK_BYTES;
        self.lock().retain(|(id, chunk), _| *id != region || !has(*chunk));
    }

    /// How many chunks are known.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// True if none are.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Chunks> {
        // Single inserts and removes cannot be left half done.
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk that begins at `base`; the caller has a hold on some of it.
    fn chunk(&self, regions: &Regions, id: RegionId, index: u64, base: u64) -> Result<Option<Arc<Chunk>>, Error> {
        let entry = self.lock().entry((id, index)).or_default().clone();
        // Whoever comes second waits for the first; chunks of other regions do not.
        let mut slot = entry.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_none() {
            let pinned = regions.get(id).map(|region| self.pin(region, index, base)).transpose();
            if !matches!(pinned, Ok(Some(_))) {
                self.lock().remove(&(id, index));
            }
            *slot = pinned?;
        }
        let chunk = slot.clone();
        drop(slot);
        // A removal that came in between has not seen a new entry.
        if regions.get(id).is_none() {
            self.forget(id, 0..u64::MAX);
        }
        Ok(chunk)
    }

    fn pin(&self, region: Region, index: u64, base: u64) -> Result<Arc<Chunk>, Error> {
        let (bytes, access) = match &region {
            // The table behind the slots is not for peers.
            Region::Arena(arena) => (arena.offset_of(arena.slots(), 0), Access { read: true, write: true }),
            Region::Buffer(buffer) => (buffer.bytes(), buffer.access()),
        };
        let bytes = (bytes - index * CHUNK_BYTES).min(CHUNK_BYTES) as usize;
        let address = NonNull::new(base as *mut u8).ok_or_else(|| Error::bug("a region at address 0"))?;
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        let remote = flag(access.read, ACCESS_REMOTE_READ) | flag(access.write, ACCESS_REMOTE_WRITE);
        let register = |flags| {
            // SAFETY: the caller has a hold on bytes of this region, so it is mapped, and `region` keeps it so.
            let all = self.rails.iter().map(|rail| unsafe { Registration::new(rail, address, bytes, flags) });
            all.collect::<Result<Vec<_>, Error>>()
        };
        let registrations = match register(remote | ACCESS_LOCAL_WRITE) {
            // Perhaps it is mapped read-only, as a file may be: then it can still be sent.
            Err(_) if !access.write => register(remote)?,
            other => other?,
        };
        Ok(Arc::new(Chunk { registrations, node: node_of(address), _region: region }))
    }
}

/// NUMA node of a page that is in memory.
fn node_of(address: NonNull<u8>) -> Option<u32> {
    const MPOL_F_NODE: nix::libc::c_long = 1;
    const MPOL_F_ADDR: nix::libc::c_long = 2;
    let mut node: nix::libc::c_int = -1;
    // SAFETY: writes one int; the address is only looked up.
    let code = unsafe {
        nix::libc::syscall(
            nix::libc::SYS_get_mempolicy,
            &raw mut node,
            std::ptr::null_mut::<nix::libc::c_ulong>(),
            0 as nix::libc::c_long,
            address.as_ptr(),
            MPOL_F_NODE | MPOL_F_ADDR,
        )
    };
    (code == 0).then(|| u32::try_from(node).ok()).flatten()
}
