//! What workers do about what they are told.

use std::sync::Arc;

use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::{GrantedSlot, LocalEvent, LocalRequest, Refusal};
use pyengine_transfer::types::{ClientId, Medium, SlotRef, Tag};

use crate::blocks::{Fill, LAYOUTS, LIMITED, Part, Task, content, note_of, tenant};
use crate::model::Model;
use crate::objects::CLASSES;

impl Model {
    pub fn told(&mut self, node: &str, client: ClientId, event: LocalEvent) {
        match event {
            LocalEvent::Flushed { ticket, ok } => {
                let books = self.books.get_mut(node).expect("every node has some");
                self.done.add("durable", books.flushed(node, ticket, ok));
                self.flushed.push((ticket, ok));
                if self.objects[node].has_asked(ticket) {
                    self.sync_objects(node);
                    let objects = self.objects.get_mut(node).expect("each has some");
                    objects.flushed(ticket, ok, &self.behind[node]);
                }
            }
            LocalEvent::Objects(event) if self.objects[node].has(client) => self.brought(node, client, &event),
            event if self.clients.contains(&(node.to_owned(), client)) => self.event(node, client, event),
            // It has died meanwhile.
            _ => {}
        }
    }

    fn event(&mut self, node: &str, client: ClientId, event: LocalEvent) {
        let tag = match &event {
            LocalEvent::Granted { tag, .. }
            | LocalEvent::Located { tag, .. }
            | LocalEvent::Refused { tag, .. }
            | LocalEvent::Opened { tag, .. }
            | LocalEvent::Arrived { tag, .. }
            | LocalEvent::Complete { tag, .. }
            | LocalEvent::Fetched { tag, .. }
            | LocalEvent::Pushed { tag, .. } => *tag,
            LocalEvent::AttachRefused { reason, .. } => panic!("attach refused: {reason}"),
            LocalEvent::Attached { .. }
            | LocalEvent::Counters { .. }
            | LocalEvent::Flushed { .. }
            | LocalEvent::Kept { .. }
            | LocalEvent::Objects(_) => return,
        };
        let place = (node.to_owned(), client, tag);
        let Some(mut task) = self.tasks.get(&place).cloned() else { return };
        let layout = self.kinds[&client].layout;
        match event {
            LocalEvent::Granted { slots, .. } => self.on_granted(node, client, tag, &mut task, slots),
            LocalEvent::Located { slots, .. } => {
                for (index, slot) in (0..).zip(slots) {
                    let right = self.expect_content(node, client, (slot, &task, tag, index), "located");
                    self.report_rot(node, client, tag, index, right);
                }
            }
            LocalEvent::Refused { refusal, .. } => {
                self.expect_refusal(node, layout, &task, refusal);
                return self.end(node, client, tag);
            }
            LocalEvent::Opened { committed, slots, .. } => {
                assert_eq!(committed.len(), task.blocks());
                for (index, slot) in (0..).zip(&slots) {
                    if !slot.committed {
                        let block = content(layout, &task.keys, tag, index);
                        self.arena(node, layout).store(slot.slot, 0, &block).expect("in range");
                    }
                }
                if let Part::Pusher { opened, .. } = &mut task.part {
                    *opened = Some((committed, slots));
                }
            }
            LocalEvent::Arrived { indices, .. } => {
                for index in indices {
                    self.expect_index(node, client, &task, tag, index, "arrived");
                }
            }
            LocalEvent::Complete { note, .. } => {
                assert_eq!(note, note_of(tag));
                for index in 0..task.blocks() as u32 {
                    self.expect_index(node, client, &task, tag, index, "complete");
                }
                if let Part::Holder { complete, .. } = &mut task.part {
                    assert!(!*complete, "complete twice");
                    *complete = true;
                    self.done.add("completed", 1);
                }
            }
            LocalEvent::Fetched { index, found, .. } => {
                if let (Ok(found), Part::Holder { slots: Some(slots), .. }) = (found, &mut task.part) {
                    let slot = &mut slots[index as usize];
                    self.done.add("shared", u64::from(slot.slot != found.slot));
                    *slot = GrantedSlot { slot: found.slot, committed: true };
                    let read = u64::from(found.medium == Medium::Ssd);
                    self.done.add("read", read * u64::from(!found.peer));
                    self.done.add("read_there", read * u64::from(found.peer));
                    self.done.add("fetched", u64::from(found.peer));
                    self.expect_index(node, client, &task, tag, index, "fetched");
                }
            }
            LocalEvent::Pushed { .. }
            | LocalEvent::Attached { .. }
            | LocalEvent::AttachRefused { .. }
            | LocalEvent::Counters { .. }
            | LocalEvent::Flushed { .. }
            | LocalEvent::Kept { .. }
            | LocalEvent::Objects(_) => {}
        }
        self.tasks.insert(place, task);
        self.push_what_is_ready(node, client);
    }

    /// What is said to be too large is so, whatever is held now.
    fn expect_refusal(&self, node: &str, layout: usize, task: &Task, refusal: Refusal) {
        if refusal != Refusal::TooLarge {
            return;
        }
        // Less what is kept for the other layouts, and one slot for staging.
        let cost = |layout| pyengine_transfer::memory::slot_bytes(layout).expect("possible");
        let objects = CLASSES.map(|number| {
            cost(pyengine_transfer::objects::classes::Class::new(number).expect("there is one").layout())
        });
        let others = objects.iter().sum::<u64>() + cost(LAYOUTS[1 - layout]);
        let limit = self.limits[node].filter(|_| tenant(&task.keys) == LIMITED).unwrap_or(u64::MAX);
        let most = (self.memory[node] - 4096 - 2 * others).min(limit) / cost(LAYOUTS[layout]);
        let total = task.blocks() as u64;
        assert!(total + 1 > most, "{total} slots fit into {most}");
    }

    pub fn arena(&self, node: &str, layout: usize) -> Arc<Arena> {
        let mut arenas = self.engine(node).arenas().map(|(_, arena)| arena);
        arenas.find(|arena| arena.layout() == LAYOUTS[layout]).expect("a client has attached").clone()
    }

    pub fn is_rotten(&self, node: &str, arena: &Arc<Arena>, slot: SlotRef) -> bool {
        let region = self.engine(node).arenas().find(|(_, its)| Arc::ptr_eq(its, arena)).map(|(region, _)| region);
        region.is_some_and(|region| self.rotten.contains(&(node.to_owned(), region, slot)))
    }

    /// True if the block is right. False: it has rotten, and not by itself.
    fn expect_content(
        &self,
        node: &str,
        client: ClientId,
        (slot, task, tag, index): (SlotRef, &Task, Tag, u32),
        what: &str,
    ) -> bool {
        let layout = self.kinds[&client].layout;
        let (arena, mut bytes) = (self.arena(node, layout), vec![0; LAYOUTS[layout].block_bytes()]);
        if !arena.load(slot, 0, &mut bytes).expect("in range") {
            let told = self.is_rotten(node, &arena, slot);
            assert!(told, "{what} at {node}: {slot:?} is called readable, but its checksum does not hold");
            return false;
        }
        let expected = content(layout, &task.keys, tag, index);
        assert_eq!(bytes, expected, "{what} at {node}: {slot:?} holds the wrong bytes");
        true
    }

    fn report_rot(&mut self, node: &str, client: ClientId, tag: Tag, index: u32, right: bool) {
        if !right {
            self.done.add("rotten", 1);
            self.world.request(node, client, LocalRequest::Corrupt { tag, index });
        }
    }

    fn expect_index(&mut self, node: &str, client: ClientId, task: &Task, tag: Tag, index: u32, what: &str) {
        let Part::Holder { slots: Some(slots), .. } = &task.part else { panic!("{what} before it was granted") };
        let right = self.expect_content(node, client, (slots[index as usize].slot, task, tag, index), what);
        self.report_rot(node, client, tag, index, right);
    }

    fn on_granted(&mut self, node: &str, client: ClientId, tag: Tag, task: &mut Task, granted: Vec<GrantedSlot>) {
        assert_eq!(granted.len(), task.blocks());
        let Part::Holder { slots, fill, .. } = &mut task.part else { panic!("granted to one who did not ask") };
        *slots = Some(granted.clone());
        let (fill, layout) = (fill.clone(), self.kinds[&client].layout);
        let wanted: Vec<u32> =
            (0..).zip(&granted).filter(|(_, slot)| !slot.committed).map(|(index, _): (u32, _)| index).collect();
        for (index, slot) in (0..).zip(&granted) {
            if slot.committed {
                self.expect_index(node, client, task, tag, index, "granted");
            } else {
                self.expect_no_other_writer(node, client, tag, slot.slot);
            }
        }
        match fill {
            Fill::Own => {
                for &index in &wanted {
                    // A private block is pushed under the other tag, and so has that one's content.
                    let of = self.pushed_as.get(&tag).copied().unwrap_or(tag);
                    let block = content(layout, &task.keys, of, index);
                    self.arena(node, layout).store(granted[index as usize].slot, 0, &block).expect("in range");
                }
                self.world.request(node, client, LocalRequest::Commit { tag, indices: wanted });
            }
            Fill::Fetch(from) => {
                self.world.request(node, client, LocalRequest::Fetch { tag, indices: wanted, from });
            }
            Fill::Pushed | Fill::Layers => {}
        }
    }

    /// Nobody else who lives may believe that this slot is his to write.
    fn expect_no_other_writer(&self, node: &str, client: ClientId, tag: Tag, slot: SlotRef) {
        for ((at, by, other), task) in &self.tasks {
            let theirs = match &task.part {
                Part::Holder { slots: Some(slots), .. } => slots,
                Part::Pusher { opened: Some((_, slots)), pushed: false, .. } => slots,
                _ => continue,
            };
            let same = self.kinds[by].layout == self.kinds[&client].layout;
            if at == node && same && (*by, *other) != (client, tag) {
                let mut writable = theirs.iter().filter(|slot| !slot.committed);
                let taken = writable.any(|theirs| theirs.slot.slot == slot.slot);
                assert!(!taken, "{slot:?} at {node} is given to {tag:?} while {other:?} may write it: {task:?}");
            }
        }
    }

    /// Pushers whose grant is open and whose own blocks are committed, or are theirs to write, push them, in parts.
    fn push_what_is_ready(&mut self, node: &str, client: ClientId) {
        let mine: Vec<_> = self.tasks.keys().filter(|(at, by, _)| at == node && *by == client).cloned().collect();
        for place in mine {
            let Some(mut task) = self.tasks.get(&place).cloned() else { continue };
            let Part::Pusher { local, opened: Some((committed, slots)), pushed: false, .. } = &task.part else {
                continue;
            };
            let held = self.tasks.get(&(node.to_owned(), client, *local));
            let own = match held.map(|held| &held.part) {
                Some(Part::Holder { slots: Some(slots), fill, .. }) => Some((slots.clone(), fill.clone())),
                _ => None,
            };
            match own {
                None if slots.is_empty() => continue,
                Some((own, Fill::Layers)) if slots.is_empty() => {
                    self.push_layers(place, task, &own);
                    continue;
                }
                _ => {}
            }
            let (local, tag) = (*local, place.2);
            let all: Vec<u32> = (0..committed.len() as u32).collect();
            let (first, rest) = all.split_at(self.random.below(all.len() as u64 + 1) as usize);
            let (first, rest) = (first.to_vec(), rest.to_vec());
            if let Part::Pusher { pushed, .. } = &mut task.part {
                *pushed = true;
            }
            self.tasks.insert(place, task);
            if !first.is_empty() {
                let push = LocalRequest::Push { local, tag, indices: first, first: 0, strips: None, note: None };
                self.world.request(node, client, push);
            }
            let note = Some(note_of(tag));
            self.world.request(
                node,
                client,
                LocalRequest::Push { local, tag, indices: rest, first: 0, strips: None, note },
            );
        }
    }

    /// Writes and pushes some strips of blocks that are to be written; with the last ones all else.
    fn push_layers(&mut self, place: (String, ClientId, Tag), mut task: Task, own: &[GrantedSlot]) {
        let (node, client, tag) = (place.0.clone(), place.1, place.2);
        let Part::Pusher { local, strips: done, pushed, .. } = &mut task.part else { return };
        let (local, layout) = (*local, self.kinds[&client].layout);
        let (arena, all, bytes) = (self.arena(&node, layout), LAYOUTS[layout].strips, LAYOUTS[layout].strip_bytes);
        let (wanted, have): (Vec<u32>, Vec<u32>) =
            (0..own.len() as u32).partition(|&index| !own[index as usize].committed);
        let mut requests = Vec::new();
        while *done < all {
            let end = *done + 1 + self.random.below(u64::from(all - *done)) as u32;
            for &index in &wanted {
                let block = content(layout, &task.keys, tag, index);
                let part = &block[(*done * bytes) as usize..(end * bytes) as usize];
                arena.store(own[index as usize].slot, *done, part).expect("in range");
            }
            let strips = Some((*done, end));
            let push = LocalRequest::Push { local, tag, indices: wanted.clone(), first: 0, strips, note: None };
            requests.push(push);
            *done = end;
            if self.random.permille(300) {
                break;
            }
        }
        if *done == all {
            *pushed = true;
            self.done.add("layered", u64::from(!wanted.is_empty()));
            let at = if self.random.permille(500) { requests.len() } else { requests.len().saturating_sub(1) };
            requests.insert(at, LocalRequest::Commit { tag: local, indices: wanted });
            let note = Some(note_of(tag));
            requests.push(LocalRequest::Push { local, tag, indices: have, first: 0, strips: None, note });
        }
        self.tasks.insert(place, task);
        requests.into_iter().for_each(|request| self.world.request(&node, client, request));
    }
}
