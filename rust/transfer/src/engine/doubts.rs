//! Hints of what is not there (`objects/hints.rs`). A word that is on its way while homes move may be believed by one who
//! never hears of its end: then nobody could get the name, nor put it.
//!
//! ```text
//! a member has not what it should have ---> Doubt ---> home \
//!                       a put is refused because of a hint --+---> Check ---> the holder ---> Told: it is not here
//! ```
//!
//! The holder itself is asked, as it alone says in order what comes and goes: what it holds again meanwhile stays known.

use crate::messages::PeerMessage;
use crate::objects::hints::{Head, SELF};
use crate::objects::talk::Talk;
use crate::types::{BlockKey, NodeId};

use super::Engine;
use super::cluster::PART;

impl Engine {
    /// A member does not give an object that it is said to hold.
    pub(super) fn doubt(&mut self, head: Head, holder: NodeId) {
        match self.cluster.home(&head.key) {
            Some(home) if home == self.node.node => self.doubted(head, &holder),
            Some(home) => self.say(&home, PeerMessage::Objects(Talk::Doubt { head, holder })),
            None => {}
        }
    }

    /// As its home: if a hint says so, the holder is asked.
    pub(super) fn doubted(&mut self, head: Head, holder: &NodeId) {
        let hinted = self.cluster.book().hinted(&head.key);
        if hinted.is_some_and(|(known, holders)| known == head && holders.contains(holder)) {
            self.cluster.doubts.entry(holder.clone()).or_default().push(head);
        }
    }

    /// As its home: somebody may not put this name, as there is one. Or is there?
    pub(super) fn doubt_hint(&mut self, key: &BlockKey) {
        let Some((head, holders)) = self.cluster.book().hinted(key) else { return };
        for holder in holders {
            self.cluster.doubts.entry(holder).or_default().push(head);
        }
    }

    /// After every input: asks the holders.
    pub(super) fn check_hints(&mut self) {
        for (node, heads) in std::mem::take(&mut self.cluster.doubts) {
            if node == self.node.node {
                for head in self.not_here(heads) {
                    self.hear(SELF, head, false);
                }
                continue;
            }
            for heads in heads.chunks(PART) {
                self.say(&node, PeerMessage::Objects(Talk::Check { heads: heads.to_vec() }));
            }
        }
    }

    /// A home asks whether these are here. Of another value of a name it has been told.
    pub(super) fn answer_check(&mut self, home: &NodeId, heads: Vec<Head>) {
        let news: Vec<(Head, bool)> = self.not_here(heads).into_iter().map(|head| (head, false)).collect();
        if !news.is_empty() {
            self.say(home, PeerMessage::Objects(Talk::Told { news, all: None, heard: false }));
        }
    }

    /// What is on its way to the SSD is here, too.
    fn not_here(&self, heads: Vec<Head>) -> Vec<Head> {
        heads.into_iter().filter(|head| self.objects.catalog.find(&head.key).is_none()).collect()
    }
}
