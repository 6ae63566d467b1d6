//! Registered memory as its owner holds it, and the names that peers can ask for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::endpoint::handle::RegionHandle;
use crate::error::Error;
use crate::messages::RegionInfo;
use crate::region::{Access, Buffer, Regions};
use crate::types::{NodeAddress, RegionId};

/// Longest name of a region, in bytes.
pub const NAME_LIMIT: usize = 256;
/// Most regions with names.
const NAMES_LIMIT: usize = 1 << 16;

/// Regions by name.
#[derive(Default)]
pub(super) struct Names(Mutex<HashMap<String, RegionInfo>>);

impl Names {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, RegionInfo>> {
        // Single inserts and removes cannot be left half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn find(&self, name: &str) -> Option<RegionInfo> {
        self.lock().get(name).copied()
    }
}

/// Refuses names that no region can have.
pub(super) fn check_name(name: &str) -> Result<(), Error> {
    if name.is_empty() || name.len() > NAME_LIMIT {
        return Err(Error::bug(format!("a region's name has 1 to {NAME_LIMIT} bytes, not {}", name.len())));
    }
    Ok(())
}

/// Memory that is registered with an engine. Dropping it fences it at once, without waiting: the buffer's owner is
/// dropped when nobody touches it any more.
pub struct Registration {
    handle: RegionHandle,
    buffer: Arc<Buffer>,
    regions: Arc<Regions>,
    names: Arc<Names>,
    name: Option<String>,
    writable: bool,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registration({:?}, {:?})", self.handle.region, self.buffer)
    }
}

impl Registration {
    pub(super) fn new(
        me: &NodeAddress,
        regions: &Arc<Regions>,
        names: &Arc<Names>,
        buffer: Buffer,
        name: Option<&str>,
        writable: bool,
    ) -> Result<Self, Error> {
        let (bytes, Access { read, write }) = (buffer.bytes(), buffer.access());
        let buffer = Arc::new(buffer);
        // Held while the region is added, so that of two with one name only one is.
        let mut named = names.lock();
        if let Some(name) = name {
            check_name(name)?;
            if named.contains_key(name) {
                return Err(Error::bug(format!("a region named {name:?} is registered: unregister it first")));
            }
            if named.len() >= NAMES_LIMIT {
                return Err(Error::bug(format!(
                    "{NAMES_LIMIT} regions have names already: give peers handles instead"
                )));
            }
        }
        let region = regions.add(buffer.clone());
        let info = RegionInfo { region, bytes, grain: 0, read, write };
        if let Some(name) = name {
            named.insert(name.into(), info);
        }
        drop(named);
        let (regions, names, name) = (regions.clone(), names.clone(), name.map(Into::into));
        Ok(Self { handle: RegionHandle::of(me, info), buffer, regions, names, name, writable })
    }

    /// What peers need to name it.
    pub fn handle(&self) -> &RegionHandle {
        &self.handle
    }

    /// Its number in this life of the engine.
    pub fn region(&self) -> RegionId {
        self.handle.region
    }

    /// How large it is.
    pub fn bytes(&self) -> u64 {
        self.handle.bytes
    }

    /// Its memory.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// False if it cannot be written, by nobody.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// True once nobody may begin to touch it any more.
    pub fn is_fenced(&self) -> bool {
        self.regions.get(self.handle.region).is_none()
    }

    /// True once it is fenced and nobody touches it: the memory may be freed.
    pub fn is_quiet(&self) -> bool {
        self.buffer.is_quiet()
    }

    /// Nobody may begin to touch it from now on: later copies are refused as fenced, here and by peers.
    pub fn fence(&self) {
        if self.regions.remove(self.handle.region).is_some()
            && let Some(name) = &self.name
        {
            self.names.lock().remove(name);
        }
    }

    /// Fences it, and waits until nobody touches it. May be called again.
    ///
    /// # Errors
    /// Retry: it is still touched after `within`. It stays fenced, and the memory must not be freed yet.
    pub fn unregister(&self, within: Duration) -> Result<(), Error> {
        self.fence();
        if self.buffer.wait_quiet(within) {
            return Ok(());
        }
        Err(Error::retry(format!(
            "a transfer still touches the region after {within:?}: it stays fenced, and its memory must stay too; call \
             unregister again (a transport lets go at the latest when nothing has moved for 3 s)"
        )))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.fence();
    }
}
