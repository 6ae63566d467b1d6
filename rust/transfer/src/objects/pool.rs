//! The client: values by name, put and got as a whole.
//!
//! An object is immutable until it is removed: a name that is there is not written again, and a put says so. So copies of
//! an object in several places can never differ, a view never changes under its reader, and of several that put one name
//! at once one wins.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use super::catalog::Catalog;
use super::classes::{self, CHUNK, Class, NAME_LIMIT, Trailer, VALUE_LIMIT, tail};
use super::messages::{
    BATCH_LIMIT, Cursor, LIST_LIMIT, Listed, ObjectEvent, ObjectRequest, ObjectStats, Reserved, Wanted, chain, lone,
};
use super::road::{Inside, Pinned, Road, Socket};
use super::unused::LINGER;
use super::visit::{Lack, Part, WINDOW};
use crate::client::ClientEvent;
use crate::daemon::Happening;
use crate::engine::Keeping;
use crate::error::Error;
use crate::keys::{Key, chunk_keys, object_key};
use crate::link::random;
use crate::mailbox::Mailbox;
use crate::messages::Refusal;
use crate::types::{BlockKey, ClientId, Medium};

/// Bytes of slots that one client reserves at a time, 32 of the largest: enough that a round trip is little beside the
/// copying, and little beside any pool.
pub(super) const ROUND_BYTES: u64 = 33 << 20;
/// How often room is waited for in vain, or a block is brought that is evicted before it is pinned.
pub(super) const TRIES: usize = 64;
/// Bytes of values that are written before their copies begin: enough that a message is little beside them.
const SPREAD_BYTES: usize = 4 << 20;
/// How long a flush may take: what it waits for fails by itself far sooner, if it makes no headway.
const FLUSH_PATIENCE: Duration = Duration::from_secs(3600);

/// A pool of objects. Use it from any thread.
#[derive(Debug)]
pub struct Pool {
    pub(super) road: Road,
    key: Key,
    next_put: AtomicU64,
    /// Drawn for this client: tells its puts from others'.
    drawn: [u8; 8],
}

/// The value of an object.
#[derive(Debug)]
pub enum Value {
    /// In the pool itself, from which it does not go while this lives.
    Pinned(Pinned, usize),
    /// A copy, verified: of a value of several blocks.
    Copied(Vec<u8>),
}

impl Value {
    /// Its bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Pinned(_, length) => *length,
            Self::Copied(bytes) => bytes.len(),
        }
    }

    /// True if it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it begins. It stays there, and does not change, while this lives.
    pub fn pointer(&self) -> *const u8 {
        match self {
            Self::Pinned(pinned, _) => pinned.arena().block_pointer(pinned.slot().slot).as_ptr(),
            Self::Copied(bytes) => bytes.as_ptr(),
        }
    }

    /// True if it is what was put, by its checksums. They were made when it was put; a view does not look at them.
    ///
    /// # Errors
    /// Bug: the slot is not in its arena.
    pub fn verify(&self) -> Result<bool, Error> {
        match self {
            Self::Pinned(pinned, _) => classes::verify(pinned.arena(), pinned.slot()),
            Self::Copied(_) => Ok(true),
        }
    }

    /// A copy of its bytes, verified. `None`: they are not what was put.
    ///
    /// # Errors
    /// As `verify`.
    pub fn to_vec(&self) -> Result<Option<Vec<u8>>, Error> {
        match self {
            Self::Pinned(pinned, length) => {
                let mut bytes = vec![0; *length];
                let intact = classes::read(pinned.arena(), pinned.slot(), &mut bytes)?;
                Ok(intact.then_some(bytes))
            }
            Self::Copied(bytes) => Ok(Some(bytes.clone())),
        }
    }
}

/// A value that is being put.
struct Item<'a> {
    /// Its place in the caller's list.
    at: usize,
    put: u64,
    key: BlockKey,
    class: Class,
    name: &'a [u8],
    value: &'a [u8],
}

impl Pool {
    /// Dials a daemon's socket.
    ///
    /// # Errors
    /// Retry if nobody answers within `timeout`; give up if the key is refused.
    pub fn connect(socket: &Path, session_key: Key, object_key: Key, timeout: Duration) -> Result<Self, Error> {
        Self::new(Road::Socket(Socket::connect(socket, session_key, timeout)?), object_key)
    }

    /// Within the daemon's process; see there.
    pub(crate) fn inside(
        happenings: SyncSender<Happening>,
        client: ClientId,
        mailbox: Arc<Mailbox<ClientEvent>>,
        catalog: Arc<Catalog>,
        object_key: Key,
    ) -> Result<Self, Error> {
        Self::new(Road::Inside(Inside::new(happenings, client, mailbox, catalog)), object_key)
    }

    fn new(road: Road, key: Key) -> Result<Self, Error> {
        Ok(Self { road, key, next_put: AtomicU64::new(1), drawn: random()? })
    }

    /// Another one for each put of each client: four thousand million puts of one later nobody has one of the old values.
    fn drawn(&self, put: u64) -> [u8; 12] {
        let mut drawn = [0; 12];
        drawn[..8].copy_from_slice(&self.drawn);
        drawn[8..].copy_from_slice(&put.to_le_bytes()[..4]);
        drawn
    }

    fn key(&self, name: &[u8]) -> Result<BlockKey, Error> {
        match name.len() {
            1..=NAME_LIMIT => Ok(object_key(name, &self.key)),
            0 => Err(Error::bug("a key is empty: it has 1 to 1024 bytes")),
            other => Err(Error::bug(format!(
                "a key of {other} bytes: it has 1 to {NAME_LIMIT}; give its hash if it is longer"
            ))),
        }
    }

    pub(super) fn keys(&self, names: &[&[u8]]) -> Result<Vec<BlockKey>, Error> {
        names.iter().map(|name| self.key(name)).collect()
    }

    // -- writing -------------------------------------------------------------------------------------------------------

    /// Stores values. Per item: true if it is stored now, false if there was one of that name, or why it could not be.
    ///
    /// # Errors
    /// Bug: an impossible name; then nothing is stored. Retry: the daemon is gone.
    pub fn put(&self, items: &[(&[u8], &[u8])]) -> Result<Vec<Result<bool, Error>>, Error> {
        self.put_for(items, 1)
    }

    /// As `put`; and copies of what is there already begin to go to as many nodes while the rest is written.
    pub(super) fn put_for(&self, items: &[(&[u8], &[u8])], copies: u32) -> Result<Vec<Result<bool, Error>>, Error> {
        let mut outcomes: Vec<Result<bool, Error>> = vec![Ok(false); items.len()];
        let mut small = VecDeque::new();
        let mut large = Vec::new();
        for (at, &(name, value)) in items.iter().enumerate() {
            let (key, put) = (self.key(name)?, self.next_put.fetch_add(1, Relaxed));
            let item = Item { at, put, key, class: Class::fitting(value.len() as u64, name.len()), name, value };
            if value.len() as u64 <= CHUNK { small.push_back(item) } else { large.push(item) }
        }
        let (mut waited, mut lingered) = (0, false);
        while !small.is_empty() {
            let round = next_round(&mut small);
            let outcome = self.put_round(&round, copies, &mut outcomes);
            if outcome.is_err() {
                self.road.tell(ObjectRequest::Abandon { puts: round.iter().map(|item| item.put).collect() });
            }
            // What found no room because of the others of its round may find it now: they may be evicted. So may what was
            // alone, when something has been written to the SSD, or when others have told that they view it no more.
            let stored = outcome?;
            waited = if stored > 0 { 0 } else { waited + 1 };
            let full = round.iter().any(|item| is_full(&outcomes[item.at]));
            let again = stored > 0
                || full && waited <= TRIES && self.await_room()?
                || full && !std::mem::replace(&mut lingered, true) && linger();
            for mut item in round.into_iter().rev().filter(|item| again && is_full(&outcomes[item.at])) {
                item.put = self.next_put.fetch_add(1, Relaxed);
                small.push_front(item);
            }
        }
        for mut item in large {
            loop {
                let outcome = self.put_large(&item);
                if !matches!(outcome, Ok(true)) {
                    self.road.tell(ObjectRequest::Abandon { puts: vec![item.put] });
                }
                outcomes[item.at] = outcome;
                if lingered || !is_full(&outcomes[item.at]) {
                    break;
                }
                item.put = self.next_put.fetch_add(1, Relaxed);
                lingered = linger();
            }
        }
        Ok(outcomes)
    }

    /// Values of a block each. Returns how many were stored.
    fn put_round(&self, round: &[Item<'_>], copies: u32, outcomes: &mut [Result<bool, Error>]) -> Result<usize, Error> {
        let wanted = round.iter().map(|item| Wanted {
            put: item.put,
            class: item.class.number(),
            key: item.key,
            parent: lone(self.drawn(item.put)),
            index: 0,
        });
        let reserved = self.reserve(wanted.collect())?;
        let (mut written, mut bytes, mut stored) = (Vec::new(), 0, 0);
        for (item, reserved) in round.iter().zip(reserved) {
            match reserved {
                Reserved::There => outcomes[item.at] = Ok(false),
                Reserved::Refused(refusal) => outcomes[item.at] = Err(self.no_room(refusal, item.value.len())),
                Reserved::Slot { region, slot } => {
                    let trailer = Trailer { value: item.value.len() as u64, nonce: [0; 16], index: 0, name: item.name };
                    let arena = self.road.arena(region)?;
                    classes::write(&arena, slot, item.value, &trailer)?;
                    written.push(item);
                    bytes += item.value.len();
                }
            }
            if copies > 1 && bytes >= SPREAD_BYTES {
                let keys = written.iter().map(|item| item.key).collect();
                stored += self.commit_round(&std::mem::take(&mut written), outcomes)?;
                self.road.tell(ObjectRequest::Spread { keys, wanted: copies });
                bytes = 0;
            }
        }
        Ok(stored + self.commit_round(&written, outcomes)?)
    }

    fn commit_round(&self, written: &[&Item<'_>], outcomes: &mut [Result<bool, Error>]) -> Result<usize, Error> {
        let stored = self.commit(written.iter().map(|item| (item.put, 0)).collect())?;
        for (item, stored) in written.iter().zip(&stored) {
            outcomes[item.at] = Ok(*stored);
        }
        Ok(stored.into_iter().filter(|stored| *stored).count())
    }

    /// A value of several blocks: the head is readable last, so nobody sees a part.
    fn put_large(&self, item: &Item<'_>) -> Result<bool, Error> {
        let value = item.value.len() as u64;
        let ObjectStats { capacity, ssd_capacity, .. } = self.stats()?;
        if value > VALUE_LIMIT.min(capacity.saturating_add(ssd_capacity)) {
            return Err(self.no_room(Refusal::TooLarge, item.value.len()));
        }
        let nonce = random()?;
        let blocks = classes::blocks(value);
        let mut keys = vec![item.key];
        keys.extend(chunk_keys(item.key, &nonce, blocks - 1, &self.key));
        let whole = chain(blocks, keys.get(1));
        let mut left: VecDeque<u32> = (0..blocks).collect();
        let mut waited = 0;
        while !left.is_empty() {
            let round: Vec<u32> = left.drain(..left.len().min((ROUND_BYTES / CHUNK) as usize)).collect();
            let wanted = round.iter().map(|&index| Wanted {
                put: item.put,
                class: Class::LARGEST.number(),
                key: keys[index as usize],
                parent: if index == 0 { whole } else { keys[index as usize - 1] },
                index,
            });
            let reserved = self.reserve(wanted.collect())?;
            let mut written = Vec::new();
            let mut refused = Vec::new();
            for (&index, reserved) in round.iter().zip(reserved) {
                let (region, slot) = match reserved {
                    Reserved::Slot { region, slot } => (region, slot),
                    // Its other blocks have names that nobody else can have.
                    Reserved::There => return Ok(false),
                    Reserved::Refused(Refusal::Full) => {
                        refused.push(index);
                        continue;
                    }
                    Reserved::Refused(Refusal::Missing) => return Err(torn()),
                    Reserved::Refused(refusal) => return Err(self.no_room(refusal, item.value.len())),
                };
                let name = if index == 0 { item.name } else { &[] };
                let trailer = Trailer { value, nonce, index, name };
                let from = index as usize * CHUNK as usize;
                let part = &item.value[from..from + trailer.part()];
                let arena = self.road.arena(region)?;
                classes::write(&arena, slot, part, &trailer)?;
                written.push(index);
            }
            waited = if written.is_empty() { waited + 1 } else { 0 };
            // What is on the SSD makes room for what follows.
            if written.is_empty() && (waited > TRIES || !self.await_room()?) {
                return Err(self.no_room(Refusal::Full, item.value.len()));
            }
            refused.into_iter().rev().for_each(|index| left.push_front(index));
            let behind_head = written.into_iter().filter(|index| *index > 0);
            if !self.commit(behind_head.map(|index| (item.put, index)).collect())?.into_iter().all(|stored| stored) {
                return Err(torn());
            }
        }
        if self.commit(vec![(item.put, 0)])?.contains(&true) {
            return Ok(true);
        }
        // Another one's was first; or a part of this one is gone.
        if self.where_keys(&[item.key])?[0].is_some() { Ok(false) } else { Err(torn()) }
    }

    fn reserve(&self, wanted: Vec<Wanted>) -> Result<Vec<Reserved>, Error> {
        let count = wanted.len();
        match self.road.ask(|ticket| ObjectRequest::Reserve { ticket, wanted })? {
            ObjectEvent::Reserved { blocks, .. } if blocks.len() == count => Ok(blocks),
            event => Err(unexpected(&event)),
        }
    }

    fn commit(&self, blocks: Vec<(u64, u32)>) -> Result<Vec<bool>, Error> {
        let count = blocks.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        match self.road.ask(|ticket| ObjectRequest::Commit { ticket, blocks })? {
            ObjectEvent::Committed { stored, .. } if stored.len() == count => Ok(stored),
            event => Err(unexpected(&event)),
        }
    }

    fn no_room(&self, refusal: Refusal, bytes: usize) -> Error {
        let capacity = self.stats().map_or(0, |stats| stats.capacity.saturating_add(stats.ssd_capacity));
        match refusal {
            Refusal::TooLarge => Error::give_up(format!(
                "a value of {bytes} bytes never fits a pool of {capacity} bytes: open a larger one (dram=, ssd_bytes=)"
            )),
            Refusal::Full => Error::retry(format!(
                "no room for a value of {bytes} bytes: what is in the pool of {capacity} bytes is in use; close views, or \
                 open a larger pool"
            )),
            other => Error::bug(format!("a block was refused: {other:?}")),
        }
    }

    /// Forgets objects; whoever has a view keeps it. Per name: whether there was one.
    ///
    /// # Errors
    /// Bug: an impossible name. Retry: the daemon is gone.
    pub fn remove(&self, names: &[&[u8]]) -> Result<Vec<bool>, Error> {
        let mut all = Vec::with_capacity(names.len());
        for keys in self.keys(names)?.chunks(BATCH_LIMIT) {
            match self.road.ask(|ticket| ObjectRequest::Remove { ticket, keys: keys.to_vec() })? {
                ObjectEvent::Removed { removed, missing, .. } if missing.is_empty() => all.extend(removed),
                ObjectEvent::Removed { missing, .. } => {
                    return Err(Error::retry(format!(
                        "removed here and elsewhere, but {} cannot be told: ask again when it is back, or take it out of the \
                         list of members",
                        missing.join(", ")
                    )));
                }
                event => return Err(unexpected(&event)),
            }
        }
        Ok(all)
    }

    /// Keeps values on this node for so long, whoever else needs room, in somebody's name (`engine/keep.rs`). What only other
    /// nodes have is copied here first.
    ///
    /// # Errors
    /// As `remove`. Retry: there is no room for such a copy.
    pub fn keep(&self, names: &[&[u8]], ttl_ms: u64, by: &str) -> Result<Vec<Keeping>, Error> {
        let request = |ticket, keys| ObjectRequest::Keep { ticket, keys, ttl_ms, by: by.to_owned() };
        let mut outcomes = self.keeping(names, request)?;
        for (name, outcome) in names.iter().zip(&mut outcomes).filter(|(_, outcome)| **outcome == Keeping::Missing) {
            let mut here = false;
            self.visit(&[Part::head(self.key(name)?)], true, &mut |_, head| {
                here = head.is_ok();
                Ok(())
            })?;
            if here {
                *outcome = self.keeping(&[name], request)?[0];
            }
        }
        Ok(outcomes)
    }

    /// Keeps them no more in this name.
    ///
    /// # Errors
    /// As `remove`.
    pub fn unkeep(&self, names: &[&[u8]], by: &str) -> Result<Vec<Keeping>, Error> {
        self.keeping(names, |ticket, keys| ObjectRequest::Unkeep { ticket, keys, by: by.to_owned() })
    }

    fn keeping(
        &self,
        names: &[&[u8]],
        request: impl Fn(u64, Vec<BlockKey>) -> ObjectRequest,
    ) -> Result<Vec<Keeping>, Error> {
        let mut all = Vec::with_capacity(names.len());
        for keys in self.keys(names)?.chunks(BATCH_LIMIT) {
            match self.road.ask(|ticket| request(ticket, keys.to_vec()))? {
                ObjectEvent::Kept { outcomes, .. } => all.extend(outcomes),
                event => return Err(unexpected(&event)),
            }
        }
        Ok(all)
    }

    // -- reading -------------------------------------------------------------------------------------------------------

    /// Values by name; `None`: there is none. One of several blocks is a verified copy, all others are views.
    ///
    /// # Errors
    /// Bug: an impossible name. Retry: the daemon is gone, too many views are open, or there is no room for so many.
    pub fn get(&self, names: &[&[u8]]) -> Result<Vec<Option<Value>>, Error> {
        let mut values: Vec<Option<Value>> = names.iter().map(|_| None).collect();
        let keys = self.keys(names)?;
        let batches = keys.chunks(BATCH_LIMIT).zip(names.chunks(BATCH_LIMIT)).zip(values.chunks_mut(BATCH_LIMIT));
        for ((keys, names), values) in batches {
            let heads: Vec<Part> = keys.iter().copied().map(Part::head).collect();
            self.visit(&heads, true, &mut |at, head| {
                let Some((head, trailer)) = head.ok().and_then(|head| self.look(head, names[at])) else {
                    return Ok(());
                };
                values[at] = if trailer.blocks() == 1 {
                    Some(Value::Pinned(head, trailer.part()))
                } else {
                    let mut bytes = vec![0; trailer.value as usize];
                    self.read(head, keys[at], &trailer, &mut bytes)?.then_some(Value::Copied(bytes))
                };
                Ok(())
            })?;
        }
        Ok(values)
    }

    /// Copies values, verified, into buffers that may be longer. Per name: the value's bytes; `None`: there is none.
    ///
    /// # Errors
    /// As `get`. Bug: a buffer is too short; others may have been filled.
    pub fn get_into(&self, items: &mut [(&[u8], &mut [u8])]) -> Result<Vec<Option<usize>>, Error> {
        let keys: Vec<BlockKey> = items.iter().map(|(name, _)| self.key(name)).collect::<Result<_, _>>()?;
        let mut lengths = vec![None; items.len()];
        let batches = keys.chunks(BATCH_LIMIT).zip(items.chunks_mut(BATCH_LIMIT)).zip(lengths.chunks_mut(BATCH_LIMIT));
        for ((keys, items), lengths) in batches {
            let heads: Vec<Part> = keys.iter().copied().map(Part::head).collect();
            self.visit(&heads, true, &mut |at, head| {
                let (name, into) = &mut items[at];
                let Some((head, trailer)) = head.ok().and_then(|head| self.look(head, name)) else { return Ok(()) };
                let (length, room) = (trailer.value as usize, into.len());
                let into = into.get_mut(..length).ok_or_else(|| {
                    Error::bug(format!("the value has {length} bytes, and the buffer only {room}: give a larger one"))
                })?;
                lengths[at] = self.read(head, keys[at], &trailer, into)?.then_some(length);
                Ok(())
            })?;
        }
        Ok(lengths)
    }

    /// What stands behind a head; `None`: it is damaged, or another one's.
    fn look<'a>(&self, head: Pinned, name: &'a [u8]) -> Option<(Pinned, Trailer<'a>)> {
        match Trailer::read(head.arena(), head.slot(), &mut tail()) {
            Some(trailer) if trailer.name == name => Some((head, Trailer { name, ..trailer })),
            Some(_) => None,
            None => {
                self.road.tell(ObjectRequest::Damaged { blocks: vec![head.at()] });
                None
            }
        }
    }

    /// Copies a whole value. False: a part is missing or damaged, and the object is gone; or a part is not to be had now.
    fn read(&self, head: Pinned, key: BlockKey, trailer: &Trailer<'_>, into: &mut [u8]) -> Result<bool, Error> {
        let (first, mut rest) = into.split_at_mut(into.len().min(CHUNK as usize));
        let mut whole = classes::read(head.arena(), head.slot(), first)?;
        let mut unreachable = false;
        let keys = if whole { chunk_keys(key, &trailer.nonce, trailer.blocks() - 1, &self.key) } else { Vec::new() };
        let parents = std::iter::once(&key).chain(&keys);
        let wanted = (1..).zip(keys.iter().zip(parents));
        let wanted: Vec<Part> =
            wanted.map(|(index, (key, parent))| Part { key: *key, parent: *parent, index }).collect();
        for wanted in wanted.chunks(WINDOW) {
            let here = rest.len().min(wanted.len() * CHUNK as usize);
            let (parts, later) = std::mem::take(&mut rest).split_at_mut(here);
            rest = later;
            let mut parts: Vec<&mut [u8]> = parts.chunks_mut(CHUNK as usize).collect();
            self.visit(wanted, false, &mut |at, block| {
                match (block, parts.get_mut(at)) {
                    (Ok(pinned), Some(part)) => whole &= classes::read(pinned.arena(), pinned.slot(), part)?,
                    (Err(Lack::Unreachable), _) => unreachable = true,
                    _ => whole = false,
                }
                Ok(())
            })?;
            if !whole || unreachable {
                break;
            }
        }
        if !whole {
            self.road.tell(ObjectRequest::Damaged { blocks: vec![head.at()] });
        }
        Ok(whole && !unreachable)
    }

    /// Per name: whether there is an object. Pins nothing, so it may be gone a moment later.
    ///
    /// # Errors
    /// As `remove`.
    pub fn exists(&self, names: &[&[u8]]) -> Result<Vec<bool>, Error> {
        Ok(self.media(names)?.iter().map(Option::is_some).collect())
    }

    /// Per name: the best medium of this node that has the object, or its head if it is of several blocks. As `exists`.
    ///
    /// # Errors
    /// As `remove`.
    pub fn media(&self, names: &[&[u8]]) -> Result<Vec<Option<Medium>>, Error> {
        self.where_keys(&self.keys(names)?)
    }

    fn where_keys(&self, keys: &[BlockKey]) -> Result<Vec<Option<Medium>>, Error> {
        let mut all = Vec::with_capacity(keys.len());
        for keys in keys.chunks(BATCH_LIMIT) {
            match self.road.ask(|ticket| ObjectRequest::Contains { ticket, keys: keys.to_vec() })? {
                ObjectEvent::Contained { found, .. } => all.extend(found),
                event => return Err(unexpected(&event)),
            }
        }
        Ok(all)
    }

    /// Has all that can be got now, and has not been removed, written to the SSD. True: it outlives this process and the
    /// daemon's. False: there is no SSD, or it fails.
    ///
    /// # Errors
    /// Retry: the daemon is gone.
    pub fn flush(&self) -> Result<bool, Error> {
        match self.road.ask_within(FLUSH_PATIENCE, |ticket| ObjectRequest::Flush { ticket })? {
            ObjectEvent::Flushed { ok, .. } => Ok(ok),
            event => Err(unexpected(&event)),
        }
    }

    /// Some names that begin so, with their values' sizes, and where to go on (`None`: those were the last). In no order.
    /// A part of the list may be empty. Names of objects that do not lie in DRAM are read from the SSD.
    ///
    /// # Errors
    /// Retry: the daemon is gone.
    pub fn list(
        &self,
        prefix: &[u8],
        from: Option<Cursor>,
        limit: u32,
    ) -> Result<(Vec<Listed>, Option<Cursor>), Error> {
        let from = from.unwrap_or(Cursor { shard: 0, after: None });
        let (start, prefix, limit) = (prefix, prefix.to_vec(), limit.clamp(1, LIST_LIMIT));
        if prefix.len() > NAME_LIMIT {
            return Ok((Vec::new(), None));
        }
        match self.road.ask(|ticket| ObjectRequest::List { ticket, prefix, from, limit })? {
            ObjectEvent::Listed { mut objects, behind, next, .. } => {
                let heads: Vec<Part> = behind.into_iter().map(|(key, _)| Part::head(key)).collect();
                self.visit(&heads, false, &mut |_, head| {
                    let Ok(head) = head else { return Ok(()) };
                    let mut space = tail();
                    let trailer = Trailer::read(head.arena(), head.slot(), &mut space);
                    if let Some(trailer) = trailer.filter(|trailer| trailer.name.starts_with(start)) {
                        objects.push(Listed { name: trailer.name.to_vec(), bytes: trailer.value });
                    }
                    Ok(())
                })?;
                Ok((objects, next))
            }
            event => Err(unexpected(&event)),
        }
    }

    /// How full it is.
    ///
    /// # Errors
    /// Retry: the daemon is gone.
    pub fn stats(&self) -> Result<ObjectStats, Error> {
        match self.road.ask(|ticket| ObjectRequest::Stats { ticket })? {
            ObjectEvent::Stats { stats, .. } => Ok(stats),
            event => Err(unexpected(&event)),
        }
    }
}

/// As many as may be reserved at a time: at least one.
fn next_round<'a>(items: &mut VecDeque<Item<'a>>) -> Vec<Item<'a>> {
    let (mut round, mut bytes) = (Vec::new(), 0);
    while let Some(item) = items.pop_front() {
        let more = item.class.layout().block_bytes() as u64;
        if !round.is_empty() && (bytes + more > ROUND_BYTES || round.len() == BATCH_LIMIT) {
            items.push_front(item);
            break;
        }
        bytes += more;
        round.push(item);
    }
    round
}

/// Waits for as long as others may take to tell that they have let go of views.
fn linger() -> bool {
    std::thread::sleep(2 * LINGER);
    true
}

fn is_full(outcome: &Result<bool, Error>) -> bool {
    outcome.as_ref().is_err_and(|error| error.kind == crate::error::ErrorKind::Retry)
}

/// A part of a value is gone before the value was there as a whole.
fn torn() -> Error {
    Error::retry(
        "a part of the value was lost while it was put: the SSD is full or fails; put it again, or give more room",
    )
}

pub(super) fn unexpected(event: &ObjectEvent) -> Error {
    if let ObjectEvent::Busy { .. } = event {
        return Error::retry(
            "the daemon asks other nodes for too much already: ask again in a moment, or ask for more at a time",
        );
    }
    Error::bug(format!("the daemon answers something else: {event:?}"))
}
