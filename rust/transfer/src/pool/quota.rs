//! What a pool does for accounts: no owner takes more than he may, and who waits for his own blocks is in nobody's way.
//!
//! An account's limit is kept as the pool's size is (`mod.rs`): all of a wish or none of it, and whoever may wait for
//! something else while he holds slots leaves one of them for staging. So nobody waits in a circle for his own slots.

use std::sync::Arc;

use super::account::{Account, Accounts, EVERYBODY};
use super::policy::Evict;
use super::slot::Owners;
use super::{Lack, Lives, More, Pool, Waiting};
use crate::messages::GrantMode;
use crate::types::{BlockKey, Owner};

/// What a wish that cannot be granted waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// Slots of this pool.
    Room,
    /// Those of its own account: others need not wait with it.
    Limit,
}

impl<M: Lives> Pool<M> {
    /// From now on owners have accounts; before there is any block. A slot takes so many bytes; `make`: the policy, once
    /// for each account.
    pub fn tell_apart(
        &mut self,
        accounts: Arc<Accounts>,
        slot_bytes: u64,
        make: impl Fn() -> Box<dyn Evict> + Send + 'static,
    ) {
        if accounts.apart() {
            self.owners = Owners::new(accounts.clone(), slot_bytes);
            self.room.classes.tell_apart(accounts, slot_bytes, Box::new(make));
        }
    }

    pub(super) fn apart(&self) -> bool {
        self.owners.accounts.apart()
    }

    /// The account of a slot's block.
    pub(super) fn account(&self, slot: u32) -> Account {
        if self.apart() { self.owners.account(self.slots[slot as usize].owner) } else { EVERYBODY }
    }

    /// Most slots that a wish of this owner may ask for, with the one that is left to staging.
    pub(super) fn largest(&self, owner: Owner) -> usize {
        let limit = self.owners.accounts.limit(owner).map(|bytes| bytes / self.owners.slot_bytes());
        limit.map_or(usize::MAX, |slots| slots as usize).min(self.limit as usize)
    }

    /// Slots that an account may take besides those it has; `None`: as many as there are.
    fn left(&self, account: Account) -> Option<i64> {
        let bytes = self.owners.accounts.left(account)?;
        Some(bytes.div_euclid(self.owners.slot_bytes() as i64))
    }

    /// True if the account may have so many more slots, perhaps for idle blocks of its own, of which it keeps some. What
    /// its blocks in other pools take, these are asked to let go of.
    pub(super) fn may_have(
        &mut self,
        account: Account,
        wanted: usize,
        kept: usize,
        since: u64,
        more: More<'_, M>,
    ) -> bool {
        let lacks = |pool: &Self| {
            let left = pool.left(account)?;
            let idle = pool.room.classes.idle(account).saturating_sub(kept);
            u64::try_from(wanted as i64 - left - idle as i64).ok().filter(|lacks| *lacks > 0)
        };
        let Some(slots) = lacks(self) else { return true };
        let over = Some((account, slots * self.owners.slot_bytes()));
        more(self, Lack { wanted: 0, needed: 0, since, over });
        lacks(self).is_none()
    }

    /// Evicts blocks of an account until it has no more than it may. False: the others are in use.
    pub(super) fn make_own_room(&mut self, account: Account) -> bool {
        while self.left(account).is_some_and(|left| left < 0) {
            if !self.evict_of(account) {
                return false;
            }
        }
        true
    }

    /// Evicts the block of an account that goes first. False: it has none that may go.
    pub fn evict_of(&mut self, account: Account) -> bool {
        let victim = self.victim(Some(account));
        victim.into_iter().for_each(|victim| self.evict(victim));
        victim.is_some()
    }

    /// What blocks that nobody uses have been found to belong to somebody who has too many: these go.
    pub(super) fn trim(&mut self) {
        for account in std::mem::take(&mut self.overdrawn) {
            if !self.make_own_room(account) {
                self.overdrawn.insert(account);
            }
        }
    }

    /// True if a block that nobody uses can be pinned, and its account then still has one slot that could be had.
    pub(super) fn leaves_one(&self, slot: u32) -> bool {
        if !self.apart() {
            return true;
        }
        let account = self.account(slot);
        let idle = self.room.classes.idle(account) as i64;
        self.left(account).is_none_or(|left| left + idle > 1)
    }

    /// True if nobody is in the way of a wish: those who wait for their own account's slots are not in that of others.
    pub(super) fn is_next(&self, owner: Owner, mode: GrantMode) -> bool {
        let before = |waiting: &&Waiting| mode != GrantMode::Staging || waiting.mode == GrantMode::Staging;
        let accounts = &self.owners.accounts;
        let another = |waiting: &Waiting| waiting.blocked.is_some() && !accounts.same(waiting.wish.owner, owner);
        self.waiting.iter().take_while(before).all(another)
    }

    /// What a wish that lacks this is blocked by, see [`Waiting::blocked`].
    pub(super) fn blocked_by(&self, short: Short, owner: Owner) -> Option<u64> {
        (short == Short::Limit).then(|| self.owners.accounts.stirred(owner).unwrap_or(0))
    }

    /// True if somebody waits for slots of this owner's account: then he does too.
    pub(super) fn waits_with_its_own(&self, owner: Owner) -> bool {
        self.waiting
            .iter()
            .any(|waiting| waiting.blocked.is_some() && self.owners.accounts.same(waiting.wish.owner, owner))
    }

    /// How many grants wait for slots of their own accounts.
    pub fn blocked(&self) -> usize {
        self.waiting.iter().filter(|waiting| waiting.blocked.is_some()).count()
    }

    /// What the account whose blocks go next has for its share.
    pub fn weight(&self) -> u64 {
        self.room.classes.weight()
    }

    /// Bytes that its slots charge to each account.
    pub fn charged(&self) -> impl Iterator<Item = (Account, u64)> {
        self.owners.charged()
    }

    /// Whose a published block is.
    pub fn owner_at(&self, key: &BlockKey) -> Option<Owner> {
        self.at(key).map(|slot| self.owners.get(self.slots[slot as usize].owner))
    }
}
