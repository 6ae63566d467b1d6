//! Copies of objects on several nodes.

use std::time::Duration;

use super::messages::{BATCH_LIMIT, ObjectEvent, ObjectRequest};
use super::pool::{Pool, unexpected};
use crate::error::Error;

/// How long copies of one batch may take: whoever makes no headway for seconds is given up long before.
const COPY_PATIENCE: Duration = Duration::from_secs(3600);

impl Pool {
    /// As `put`, and returns when so many nodes have each, as far as that can be (`replicate` says of how many).
    ///
    /// # Errors
    /// As `put`.
    pub fn put_copies(&self, items: &[(&[u8], &[u8])], copies: u32) -> Result<Vec<Result<bool, Error>>, Error> {
        let outcomes = self.put_for(items, copies)?;
        if copies > 1 {
            let names: Vec<&[u8]> = items.iter().map(|(name, _)| *name).collect();
            self.replicate(&names, copies)?;
        }
        Ok(outcomes)
    }

    /// Sees to it that so many nodes have each of these objects, the first ones in the order of the name's homes if more are
    /// needed. Per name: how many have it now; fewer than wanted if there are not so many nodes, or no room on them; 0: there
    /// is none.
    ///
    /// # Errors
    /// Bug: an impossible name. Retry: the daemon is gone.
    pub fn replicate(&self, names: &[&[u8]], copies: u32) -> Result<Vec<u32>, Error> {
        let mut all = Vec::with_capacity(names.len());
        for keys in self.keys(names)?.chunks(BATCH_LIMIT) {
            let ask = |ticket| ObjectRequest::Copies { ticket, keys: keys.to_vec(), wanted: copies };
            match self.road.ask_within(COPY_PATIENCE, ask)? {
                ObjectEvent::Copies { copies, .. } => all.extend(copies),
                event => return Err(unexpected(&event)),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    // Goal: who was turned away asks again, and takes nothing for done.
    #[test]
    fn a_busy_daemon_is_asked_again() {
        assert_eq!(unexpected(&ObjectEvent::Busy { ticket: 1 }).kind, ErrorKind::Retry);
    }
}
