//! Accounts: how much of a node's memory each owner's blocks take, how much they may, and what is fair.
//!
//! ```text
//! owner (namespace, tenant) ---> the quota that names him most exactly ---> its account: all owners of one quota share it
//!                           ---> no quota names him                    ---> an account of his own, as the quota for all others says
//! no quotas at all          ---> one account for everybody, of which nobody keeps books
//! ```
//!
//! A **limit** is hard: who is at his limit makes room among his own blocks, and waits if they are all in use. A **share**
//! is what counts when the pool is full: who has most for his share gives first, so that everybody has at least his share
//! while he wants it, and all of what nobody wants. Both are over all layouts of a node, so all its pools have one [`Accounts`].

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::types::Owner;

/// Number of an account.
pub type Account = u32;

/// The account of everybody who has none of his own.
pub const EVERYBODY: Account = 0;

/// Accounts that there are at once; owners beyond share the first one. Each block that is to make room is looked for in
/// the heaviest of them, some 3 us among so many.
pub const ACCOUNTS: usize = 1024;

/// Most that a share may weigh: a thousandth of a node is enough for anybody.
pub const SHARE_LIMIT: u32 = 1000;

/// What owners may have of a node. Without a namespace it is for all of a tenant, without a tenant for all of a
/// namespace, without either for each owner whom no other names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Of these blocks.
    pub namespace: Option<u64>,
    /// Of his blocks.
    pub tenant: Option<u64>,
    /// Most bytes in memory; `None`: no limit.
    pub dram_bytes: Option<u64>,
    /// Most bytes on SSD; `None`: no limit.
    pub ssd_bytes: Option<u64>,
    /// How much more than others of share 1 it is to have when there is not enough for all.
    pub share: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self { namespace: None, tenant: None, dram_bytes: None, ssd_bytes: None, share: 1 }
    }
}

/// Refuses quotas that contradict each other or mean nothing.
///
/// # Errors
/// Give up: which one, and what to do.
pub fn check_quotas(quotas: &[Quota]) -> Result<(), Error> {
    for (index, quota) in quotas.iter().enumerate() {
        let number = index + 1;
        if quota.share == 0 || quota.share > SHARE_LIMIT {
            return Err(Error::give_up(format!(
                "quota {number}: a share of {} is impossible: give 1 to {SHARE_LIMIT}, or a dram_bytes to keep somebody small",
                quota.share
            )));
        }
        if quota.dram_bytes == Some(0) {
            return Err(Error::give_up(format!(
                "quota {number}: with no memory at all nothing could be kept, and every grant would be refused: give a few blocks"
            )));
        }
        let same = |other: &Quota| (other.namespace, other.tenant) == (quota.namespace, quota.tenant);
        if let Some(other) = quotas[..index].iter().position(same) {
            return Err(Error::give_up(format!(
                "quotas {} and {number} are for the same owners: make them one",
                other + 1
            )));
        }
    }
    if quotas.len() >= ACCOUNTS {
        return Err(Error::give_up(format!("{} quotas: at most {} are possible", quotas.len(), ACCOUNTS - 1)));
    }
    Ok(())
}

/// Whose an account is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// All owners that the quota of this number names.
    Quota(usize),
    /// One whom no quota names.
    Own(Owner),
}

/// What is known of an account.
#[derive(Clone, Copy, Debug)]
struct Book {
    name: Option<Name>,
    quota: Quota,
    /// Bytes of all its slots.
    used: u64,
    /// Pools and grants that speak of it.
    users: u32,
    /// When it was last stirred, in stirs of any.
    stirred: u64,
}

/// An account, for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whose, and what he may; of one whom no quota names, his owner with the terms for all others.
    pub quota: Quota,
    /// Bytes of memory that its blocks take.
    pub used: u64,
    name: Option<Name>,
}

#[derive(Debug, Default)]
struct Books {
    all: Vec<Book>,
    numbers: HashMap<Name, Account>,
    free: Vec<Account>,
    stirs: u64,
}

impl Books {
    fn stir(&mut self, account: Account) {
        self.stirs += 1;
        self.all[account as usize].stirred = self.stirs;
    }
}

/// All accounts of a node. The engine's thread alone uses it, so nobody ever waits for the lock.
#[derive(Debug)]
pub struct Accounts {
    /// Those that name owners.
    quotas: Vec<Quota>,
    /// Their numbers, by namespace and tenant.
    named: HashMap<(Option<u64>, Option<u64>), usize>,
    others: Quota,
    apart: bool,
    books: Mutex<Books>,
}

impl Accounts {
    /// By these quotas, which are good ones (see [`check_quotas`]). None: everybody is one, and nothing is counted.
    pub fn new(quotas: &[Quota]) -> Arc<Self> {
        let names = |quota: &Quota| quota.namespace.is_some() || quota.tenant.is_some();
        let (all, others): (Vec<Quota>, Vec<Quota>) = quotas.iter().partition(|quota| names(quota));
        let named = all.iter().enumerate().map(|(at, quota)| ((quota.namespace, quota.tenant), at)).collect();
        let others = others.first().copied().unwrap_or_default();
        let first = Book { name: None, quota: others, used: 0, users: 1, stirred: 0 };
        let books = Mutex::new(Books { all: vec![first], ..Books::default() });
        Arc::new(Self { quotas: all, named, others, apart: !quotas.is_empty(), books })
    }

    /// True if owners are told apart at all.
    pub fn apart(&self) -> bool {
        self.apart
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // What a panic leaves is numbers that are off: no reason for a second one.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most exact counts.
    fn name(&self, owner: Owner) -> (Name, Quota) {
        let Owner { namespace, tenant } = owner;
        let kinds = [(Some(namespace), Some(tenant)), (None, Some(tenant)), (Some(namespace), None)];
        let named = kinds.iter().find_map(|kind| self.named.get(kind)).copied();
        named.map_or((Name::Own(owner), self.others), |at| (Name::Quota(at), self.quotas[at]))
    }

    /// Whose account this owner's is, whether it is there now or not.
    pub fn of(&self, owner: Owner) -> Option<Name> {
        self.apart.then(|| self.name(owner).0)
    }

    /// True if these have one account.
    pub fn same(&self, one: Owner, other: Owner) -> bool {
        self.of(one) == self.of(other)
    }

    /// Something of the account's was let go of, or published: what waits for it may be served.
    pub fn stir(&self, account: Account) {
        if self.apart {
            self.books().stir(account);
        }
    }

    /// When that was last so, in no unit; `None`: it is not known.
    pub fn stirred(&self, owner: Owner) -> Option<u64> {
        let name = self.of(owner)?;
        let books = self.books();
        books.numbers.get(&name).map(|number| books.all[*number as usize].stirred)
    }

    /// The account of an owner, which stays his until as many `leave` it as have entered.
    pub fn enter(&self, owner: Owner) -> Account {
        if !self.apart {
            return EVERYBODY;
        }
        let (name, quota) = self.name(owner);
        let mut books = self.books();
        let Books { all, numbers, free, stirs } = &mut *books;
        let number = match numbers.get(&name) {
            Some(&number) => number,
            // Those who are named always get one: there are fewer quotas than accounts.
            None if matches!(name, Name::Own(_)) && numbers.len() + self.quotas.len() >= ACCOUNTS => return EVERYBODY,
            None => {
                *stirs += 1;
                let book = Book { name: Some(name), quota, used: 0, users: 0, stirred: *stirs };
                let number = free.pop().unwrap_or(all.len() as Account);
                match all.get_mut(number as usize) {
                    Some(place) => *place = book,
                    None => all.push(book),
                }
                numbers.insert(name, number);
                number
            }
        };
        all[number as usize].users += 1;
        number
    }

    /// One who entered speaks of it no more.
    pub fn leave(&self, account: Account) {
        if account == EVERYBODY {
            return;
        }
        let mut books = self.books();
        let Books { all, numbers, free, .. } = &mut *books;
        let book = &mut all[account as usize];
        book.users -= 1;
        if book.users == 0
            && let Some(name) = book.name
        {
            numbers.remove(&name);
            free.push(account);
        }
    }

    /// Its slots take so many bytes more.
    pub fn charge(&self, account: Account, bytes: u64) {
        if self.apart {
            self.books().all[account as usize].used += bytes;
        }
    }

    /// Its slots take so many bytes less.
    pub fn discharge(&self, account: Account, bytes: u64) {
        if self.apart {
            let mut books = self.books();
            books.all[account as usize].used -= bytes;
            books.stir(account);
        }
    }

    /// Bytes that it may take besides those it has; below zero if it has too many. `None`: no limit.
    pub fn left(&self, account: Account) -> Option<i64> {
        if !self.apart {
            return None;
        }
        let book = self.books().all[account as usize];
        book.quota.dram_bytes.map(|limit| limit.min(i64::MAX as u64) as i64 - book.used as i64)
    }

    /// Most bytes that blocks of this owner may take in memory.
    pub fn limit(&self, owner: Owner) -> Option<u64> {
        self.apart.then(|| self.name(owner).1.dram_bytes).flatten()
    }

    /// Most bytes that blocks of this owner's account may take on SSD, and who has part in it.
    pub fn ssd_limit(&self, owner: Owner) -> Option<(u64, impl Fn(Owner) -> bool)> {
        let (name, quota) = self.name(owner);
        let limit = quota.ssd_bytes.filter(|_| self.apart)?;
        Some((limit, move |other| self.name(other).0 == name))
    }

    /// How much it has for its share, in bytes; `less`: without so many of them.
    pub fn weight(&self, account: Account, less: u64) -> u64 {
        let book = self.books().all[account as usize];
        book.used.saturating_sub(less) / u64::from(book.quota.share)
    }

    /// Of these accounts the one that has most for its share.
    pub fn heaviest(&self, accounts: impl Iterator<Item = Account>) -> Option<Account> {
        let books = self.books();
        let weight = |account: &Account| {
            let Book { used, quota, .. } = books.all[*account as usize];
            (used / u64::from(quota.share), Reverse(*account))
        };
        accounts.max_by_key(weight)
    }

    /// All whom a quota names, and others who have something.
    pub fn standings(&self) -> Vec<Standing> {
        let books = self.books();
        let used = |name: &Name| books.numbers.get(name).map_or(0, |number| books.all[*number as usize].used);
        let named = (0..).map(Name::Quota).zip(&self.quotas);
        let mut all: Vec<Standing> =
            named.map(|(name, &quota)| Standing { quota, used: used(&name), name: Some(name) }).collect();
        let mut others: Vec<&Book> = books.all.iter().filter(|book| book.used > 0).collect();
        others.sort_by_key(|book| Reverse(book.used));
        all.extend(others.into_iter().filter_map(|&Book { name, quota, used, .. }| match name {
            Some(Name::Quota(_)) => None,
            Some(Name::Own(Owner { namespace, tenant })) => {
                let quota = Quota { namespace: Some(namespace), tenant: Some(tenant), ..quota };
                Some(Standing { quota, used, name })
            }
            None => Some(Standing { quota, used, name }),
        }));
        all
    }

    /// True if this account is the owner's.
    pub fn is_of(&self, standing: &Standing, owner: Owner) -> bool {
        standing.name == Some(self.name(owner).0)
    }

    /// Asserts that these are the bytes of each account's slots, over all pools.
    ///
    /// # Panics
    /// If not.
    pub fn check(&self, bytes: &HashMap<Account, u64>) {
        let books = self.books();
        for (number, book) in (0..).zip(&books.all).filter(|_| self.apart) {
            let expected = bytes.get(&number).copied().unwrap_or(0);
            assert_eq!(book.used, expected, "bytes of account {number}: {book:?}");
            assert!(book.users > 0 || expected == 0, "nobody speaks of account {number}: {book:?}");
        }
        assert_eq!(books.numbers.len() + books.free.len() + 1, books.all.len(), "accounts and their names");
    }
}
