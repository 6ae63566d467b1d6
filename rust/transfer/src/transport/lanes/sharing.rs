//! Memory of two processes on one host: how one side of a lane tells the other about its regions, and how that one
//! copies out of them.
//!
//! ```text
//! region with a descriptor (an arena, `Buffer::shared`): the reader maps it, read-only; sealed, so it cannot shrink
//! private memory:                                        the reader asks the kernel (process_vm_readv)
//! ```
//!
//! Only ever read: nobody writes into another process's memory. A copy counts only if the lane still stands after its last
//! byte: whoever lends memory shuts the lane down before it takes the memory back, so what was read until then was held.

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSliceMut, Result as IoResult};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use nix::fcntl::{OFlag, open};
use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::stat::{Mode, fstat};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::link::Stream;
use crate::memory::{Mapping, is_sealed};
use crate::region::{Region, Regions};
use crate::types::RegionId;

use super::body::Body;
use super::frames::{self, Flags, Header, How, Kind, Place, Shared};
use super::outflow::Outflow;
use super::socket::is_hung_up;

/// Regions of the other side that a lane remembers.
const VIEWS_LIMIT: usize = 4096;

/// A region of the other process.
pub struct View {
    memory: Memory,
    bytes: u64,
}

enum Memory {
    Mapped(Mapping),
    Private { pid: Pid, address: u64 },
}

/// Where to read.
pub enum Source {
    /// In a mapping.
    Mapped(*const u8),
    /// In another process.
    Private(Pid, u64),
}

impl View {
    /// Where these bytes are; `None` if they are outside.
    pub fn source(&self, offset: u64, bytes: u64) -> Option<Source> {
        if offset.checked_add(bytes)? > self.bytes {
            return None;
        }
        Some(match &self.memory {
            // The sum is inside the mapping, just checked.
            Memory::Mapped(mapping) => Source::Mapped(mapping.pointer().as_ptr().wrapping_add(offset as usize)),
            Memory::Private { pid, address } => Source::Private(*pid, address.wrapping_add(offset)),
        })
    }
}

/// One lane's knowledge of both sides' regions.
pub struct Sharing {
    /// The other process; none if the kernel cannot name it here.
    pid: Option<Pid>,
    offered: HashSet<RegionId>,
    /// The region that was asked for last, and is known: copies come in runs.
    last: Option<RegionId>,
    views: HashMap<RegionId, Arc<View>>,
}

impl Sharing {
    /// What a connection allows: `None` over a network.
    pub fn over(stream: &Stream) -> Option<Self> {
        let Stream::Unix(stream) = stream else { return None };
        let pid = getsockopt(stream, sockopt::PeerCredentials).ok().map(|peer| peer.pid()).filter(|pid| *pid > 0);
        Some(Self { pid: pid.map(Pid::from_raw), offered: HashSet::new(), last: None, views: HashMap::new() })
    }

    /// Tells the other side of a region, if it does not know it yet. False: there is no such region.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn offer(&mut self, regions: &Regions, id: RegionId, outflow: &mut Outflow) -> IoResult<bool> {
        if self.last == Some(id) || self.offered.contains(&id) {
            self.last = Some(id);
            return Ok(true);
        }
        let Some(region) = regions.get(id) else { return Ok(false) };
        let cookie = cookie();
        let (descriptor, bytes, address) = match &region {
            Region::Arena(arena) => (Some(arena.fd()), arena.bytes(), 0),
            Region::Buffer(buffer) => (buffer.descriptor(), buffer.bytes(), buffer.pointer().as_ptr() as u64),
        };
        let how = if descriptor.is_some() { How::Descriptor } else { How::Private };
        let descriptor = descriptor.map(read_only).transpose()?;
        self.offered.insert(id);
        // Of 0 bytes means gone. Of an empty region nothing is ever copied but 0 bytes.
        let bytes = bytes.max(1);
        outflow.push_with(region_frame(&Shared { region: id, how, bytes, address, cookie }), descriptor);
        self.last = None;
        // What is gone from here need not stay mapped there.
        self.offered.retain(|known| {
            let stays = regions.get(*known).is_some();
            if !stays {
                let gone = Shared { region: *known, how: How::Private, bytes: 0, address: 0, cookie: (0, 0) };
                outflow.push_with(region_frame(&gone), None);
            }
            stays
        });
        Ok(true)
    }

    /// The other side has told of a region.
    ///
    /// # Errors
    /// It cannot be read from here: why, for a person.
    pub fn learn(&mut self, told: Shared, descriptor: Option<OwnedFd>) -> Result<(), String> {
        if told.bytes == 0 {
            self.views.remove(&told.region);
            return Ok(());
        }
        if self.views.len() >= VIEWS_LIMIT {
            return Err(format!("more than {VIEWS_LIMIT} regions on one lane"));
        }
        let memory = match told.how {
            How::Descriptor => {
                let fd = descriptor.ok_or("a region without its descriptor")?;
                let size = fstat(&fd).map_err(|errno| format!("the region's descriptor: {errno}"))?.st_size;
                if !is_sealed(&fd) || (size as u64) < told.bytes {
                    return Err("a region that could shrink under its reader".into());
                }
                Memory::Mapped(Mapping::new(&fd, told.bytes, false).map_err(|error| error.to_string())?)
            }
            How::Private => {
                let pid =
                    self.pid.ok_or("the other process is in another pid namespace, so its memory is out of reach")?;
                check_access(pid, told.cookie)?;
                Memory::Private { pid, address: told.address }
            }
        };
        self.views.insert(told.region, Arc::new(View { memory, bytes: told.bytes }));
        Ok(())
    }

    /// The regions that these are in; `None` if the other side has not told of one.
    pub fn views(&self, places: &[Place]) -> Option<Vec<Arc<View>>> {
        let mut views: Vec<Arc<View>> = Vec::with_capacity(places.len());
        for (index, place) in places.iter().enumerate() {
            let known = index.checked_sub(1).filter(|before| places[*before].region == place.region);
            views.push(match known {
                Some(before) => views[before].clone(),
                None => self.view(place.region)?,
            });
        }
        Some(views)
    }

    /// A region that the other side has told of.
    fn view(&self, id: RegionId) -> Option<Arc<View>> {
        self.views.get(&id).cloned()
    }
}

fn region_frame(shared: &Shared) -> Vec<u8> {
    frames::encode(Kind::Region, Flags::NONE, 1, 0, 0, &frames::region_table(shared))
}

/// The same memory by a descriptor that cannot be mapped writable.
fn read_only(fd: BorrowedFd<'_>) -> IoResult<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let again = open(path.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty());
    // Without /proc a copy must do; the reader maps it read-only all the same.
    again.or_else(|_| fd.as_fd().try_clone_to_owned().map_err(|_| nix::errno::Errno::EMFILE)).map_err(Into::into)
}

/// Where this process keeps a random number, and which.
fn cookie() -> (u64, u64) {
    static COOKIE: OnceLock<Box<u64>> = OnceLock::new();
    let cookie = COOKIE.get_or_init(|| {
        // Without random numbers sessions cannot stand, so this one is never guessed in earnest.
        Box::new(u64::from_le_bytes(crate::link::random().unwrap_or_default()))
    });
    (&raw const **cookie as u64, **cookie)
}

/// True to the other process only: it may be read, and is the one we think.
fn check_access(pid: Pid, (address, value): (u64, u64)) -> Result<(), String> {
    let mut found = [0; 8];
    let from = [RemoteIoVec { base: address as usize, len: 8 }];
    let read = process_vm_readv(pid, &mut [IoSliceMut::new(&mut found)], &from);
    match read {
        Ok(8) if found == value.to_ne_bytes() => Ok(()),
        Ok(_) => Err("the other process cannot be found by its number".into()),
        Err(errno) => Err(format!(
            "private memory of the other process cannot be read ({errno}): permit process_vm_readv (the same user, no \
             stricter ptrace_scope than 0), or register memory that the engine has made (Buffer::shared)"
        )),
    }
}

/// A body that is being copied out of the other side's memory.
pub struct Pulling {
    /// Of the frame that has named it.
    pub header: Header,
    /// Where the bytes go.
    pub body: Body,
    places: Vec<Place>,
    views: Vec<Arc<View>>,
}

impl Pulling {
    /// The bodies of these copies lie there. `None`: in a region that was not told of.
    pub fn new(header: Header, body: Body, places: Vec<Place>, sharing: &Sharing) -> Option<Self> {
        let views = sharing.views(&places)?;
        Some(Self { header, body, places, views })
    }

    /// Copies on. False: the budget is used up.
    ///
    /// # Errors
    /// The other side is gone, or lies.
    pub fn pull(&mut self, socket: &Stream, budget: &mut usize) -> io::Result<bool> {
        if !self.body.pull(&self.places, &self.views, budget)? {
            return Ok(false);
        }
        // The other side shuts the lane down before it takes its memory back: if it stands, all bytes were held.
        if is_hung_up(socket.as_fd()) { Err(io::Error::other("the other side has left")) } else { Ok(true) }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is lent cannot be written, shrunk, or mistaken. Method: descriptors and cookies of this very process.
    use super::*;
    use crate::memory::sealed_memory;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::{ftruncate, getpid};

    fn told(how: How, bytes: u64, cookie: (u64, u64)) -> Shared {
        Shared { region: RegionId(1), how, bytes, address: 0x1000, cookie }
    }

    fn sharing() -> Sharing {
        Sharing { pid: Some(getpid()), offered: HashSet::new(), last: None, views: HashMap::new() }
    }

    #[test]
    fn a_reader_can_neither_write_nor_see_less_than_it_was_told() {
        let fd = sealed_memory("test", 8192).expect("memory");
        let lent = read_only(fd.as_fd()).expect("/proc is here");
        assert!(Mapping::new(&lent, 8192, true).is_err(), "a writable mapping of what was lent");
        let mut sharing = sharing();
        let short = sharing.learn(told(How::Descriptor, 8193, (0, 0)), Some(lent.try_clone().expect("a descriptor")));
        assert!(short.is_err_and(|reason| reason.contains("shrink")));
        assert!(
            sharing.learn(told(How::Descriptor, 8192, (0, 0)), None).is_err_and(|reason| reason.contains("without"))
        );
        assert!(sharing.learn(told(How::Descriptor, 8192, (0, 0)), Some(lent)).is_ok());
        let view = sharing.view(RegionId(1)).expect("learnt");
        assert!(view.source(8000, 192).is_some());
        assert!(view.source(8000, 193).is_none() && view.source(u64::MAX, 2).is_none());
        assert!(sharing.learn(told(How::Private, 0, (0, 0)), None).is_ok() && sharing.view(RegionId(1)).is_none());

        let open = memfd_create("unsealed", MFdFlags::MFD_CLOEXEC).expect("memory");
        ftruncate(&open, 8192).expect("memory");
        let unsealed = sharing.learn(told(How::Descriptor, 8192, (0, 0)), Some(open));
        assert!(unsealed.is_err_and(|reason| reason.contains("shrink")));
    }

    #[test]
    fn private_memory_is_that_of_the_process_with_the_cookie() {
        let mut sharing = sharing();
        let (address, value) = cookie();
        assert!(sharing.learn(told(How::Private, 8, (address, value)), None).is_ok());
        let other = sharing.learn(told(How::Private, 8, (address, value ^ 1)), None);
        assert!(other.is_err_and(|reason| reason.contains("cannot be found")));
        let nowhere = sharing.learn(told(How::Private, 8, (8, value)), None);
        assert!(nowhere.is_err_and(|reason| reason.contains("process_vm_readv")));
        sharing.pid = None;
        let unseen = sharing.learn(told(How::Private, 8, (address, value)), None);
        assert!(unseen.is_err_and(|reason| reason.contains("namespace")));
    }
}
