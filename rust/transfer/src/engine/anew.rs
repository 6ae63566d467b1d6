//! A home that has forgotten some hints (`objects/hints.rs`) is sure of no name, and all are asked for each that it does not
//! know. When there is room again it has all members tell what they hold of its names, and is sure again when they have.
//!
//! ```text
//! forgot, and half of the room is free ---> Anew, with a number ---> Told: all of it, and at the end that number
//! ```

use std::collections::VecDeque;

use crate::messages::PeerMessage;
use crate::objects::hints::SELF;
use crate::objects::talk::Talk;
use crate::types::{BlockKey, Nanos, NodeId};

use super::{Engine, SECOND};

/// Between two attempts: it is as much to tell as for a home that is new.
const PAUSE: Nanos = 60 * SECOND;

impl Engine {
    /// Has all tell anew, if that is worth it.
    pub(super) fn hear_anew(&mut self) {
        let cluster = &mut self.cluster;
        let mut book = cluster.book_mut();
        // Who is still telling for another reason might be taken for one who has told this.
        if book.joined.is_empty() || !book.told || self.now < cluster.anew_after || !book.hints.begin_anew() {
            return;
        }
        drop(book);
        let number = self.number();
        self.cluster.anew_after = self.now + PAUSE;
        self.cluster.anew = Some(number);
        self.cluster.look_who_told();
        for node in self.cluster.others() {
            self.say(&node, PeerMessage::Objects(Talk::Anew { number }));
        }
        for head in self.own_heads() {
            if self.cluster.home(&head.key).as_ref() == Some(&self.node.node) {
                self.hear(SELF, head, true);
            }
        }
    }

    /// A home has forgotten some, and is told all.
    pub(super) fn tell_anew(&mut self, home: &NodeId, number: u64) {
        let heads = self.own_heads().into_iter().map(|head| head.key);
        let its: VecDeque<BlockKey> = heads.filter(|key| self.cluster.home(key).as_ref() == Some(home)).collect();
        let telling = self.cluster.tellings.entry(home.clone()).or_default();
        (telling.rest, telling.anew, telling.ended) = (its, Some(number), false);
    }
}
