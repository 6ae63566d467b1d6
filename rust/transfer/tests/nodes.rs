//! Objects across nodes, over the simulated network.
//!
//! Goal: a name has one value wherever it is asked for, or none; what is removed is gone from all nodes and stays so; who
//! dies, is cut off, forgets or lies costs a miss and never a wrong value. Method: whole engines under scenes and under
//! random operations, beside a naive map; every engine's `check()` runs after every input (in `World`). A seed that fails is
//! printed with the command to repeat it.

mod cluster;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use cluster::{Cluster, SECOND, name_key};
use pyengine_transfer::messages::Refusal;
use pyengine_transfer::objects::hints::Head;
use pyengine_transfer::objects::messages::{ObjectEvent, ObjectRequest, Reserved};
use pyengine_transfer::transport::sim::{Faults, Random};

const NODES: [&str; 4] = ["a", "b", "c", "d"];

/// Those of the nodes that are not this one, and the home of the name.
fn home_and_others(cluster: &Cluster, name: u8) -> (&'static str, Vec<&'static str>) {
    let home = cluster.home(name);
    let home = NODES.into_iter().find(|node| *node == home).expect("a node");
    (home, NODES.into_iter().filter(|node| *node != home).collect())
}

#[test]
fn what_one_puts_all_find() {
    let mut cluster = Cluster::new(1, &NODES);
    for name in 0..20 {
        let node = NODES[usize::from(name) % 4];
        assert_eq!(cluster.put(node, name, u64::from(name), 1), Some(true));
        for other in NODES {
            assert!(cluster.exists(other, name), "{name} at {other}");
            assert!(!cluster.exists(other, 100 + name));
            assert_eq!(cluster.put(other, name, 99, 1), Some(false), "there is one");
        }
    }
    // The hints alone say so: nobody but the home was asked.
    assert_eq!(cluster.have(3), ["d"]);
}

#[test]
fn what_one_puts_all_get() {
    let mut cluster = Cluster::new(16, &NODES);
    for name in 0..12 {
        let node = NODES[usize::from(name) % 4];
        assert_eq!(cluster.put(node, name, u64::from(name), if name < 3 { 3 } else { 1 }), Some(true));
        let value = cluster.verify(node, name);
        for (count, other) in NODES.into_iter().filter(|other| *other != node).enumerate() {
            assert_eq!(cluster.get(other, name), value, "{name} at {other}");
            assert_eq!(cluster.get(other, 100 + name), None);
            assert_eq!(cluster.have(name).len(), count + 2, "what was got is a copy");
        }
        assert_eq!(cluster.remove(node, name), (true, vec![]));
        assert!(NODES.iter().all(|node| cluster.get(node, name).is_none()));
    }
    cluster.all_idle();
}

#[test]
fn many_who_get_one_thing_share_its_way() {
    let mut cluster = Cluster::new(17, &NODES);
    assert_eq!(cluster.put("a", 1, 1, 3), Some(true));
    let asked: Vec<_> =
        NODES.iter().flat_map(|node| [*node; 3]).map(|node| (node, cluster.begin_get(node, 1))).collect();
    let value = cluster.verify("a", 1);
    for (node, ticket) in asked {
        assert_eq!(cluster.got(node, 1, ticket), value);
    }
    cluster.world.run(2 * SECOND);
    cluster.all_idle();
}

// Goal: whoever is turned away does not hear that there is nothing. Method: more questions at once than a node has room for.
#[test]
fn too_many_questions_are_no_misses() {
    let mut cluster = Cluster::narrow(19, &NODES, 20);
    let name = (0..).find(|name| cluster.home(*name) == "c").expect("it is some name's home");
    assert_eq!(cluster.put("a", name, 1, 1), Some(true));
    let asked: Vec<u64> = (0..50).map(|_| cluster.begin_bring("b", name)).collect();
    let brought: Vec<_> = asked.into_iter().map(|ticket| cluster.brought("b", ticket)).collect();
    let some = |end| brought.iter().filter(|brought| **brought == end).count();
    assert_eq!(some(Ok(())) + some(Err(Refusal::Full)), brought.len());
    assert!(some(Err(Refusal::Full)) > 0);
    cluster.world.run(2 * SECOND);
    cluster.all_idle();
}

#[test]
fn too_many_questions_are_no_answers() {
    let mut cluster = Cluster::narrow(21, &NODES, 20);
    let name = (0..).find(|name| cluster.home(*name) == "c").expect("it is some name's home");
    let key = name_key(name.into());
    assert_eq!(cluster.put("a", name, 1, 1), Some(true));
    let crowd = |cluster: &mut Cluster, make: &dyn Fn(u64) -> ObjectRequest| {
        let asked: Vec<u64> = (0..50).map(|_| cluster.begin("b", make)).collect();
        let answers: Vec<ObjectEvent> =
            asked.into_iter().map(|ticket| cluster.answer("b", ticket).expect("it lives")).collect();
        let (busy, told): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|event| matches!(event, ObjectEvent::Busy { .. }));
        assert!(busy.len() >= 30 && !told.is_empty(), "{} of 50 were turned away", busy.len());
        told
    };
    let told = crowd(&mut cluster, &|ticket| ObjectRequest::Contains { ticket, keys: vec![key] });
    assert!(told.iter().all(|event| matches!(event, ObjectEvent::Contained { found, .. } if found[0].is_some())));
    let told = crowd(&mut cluster, &|ticket| ObjectRequest::Copies { ticket, keys: vec![key], wanted: 2 });
    assert!(told.iter().all(|event| matches!(event, ObjectEvent::Copies { copies, .. } if copies[0] >= 1)), "{told:?}");
    let told = crowd(&mut cluster, &|ticket| ObjectRequest::Remove { ticket, keys: vec![key] });
    let removed = |event: &ObjectEvent| matches!(event, ObjectEvent::Removed { removed, missing, .. } if removed[0] && missing.is_empty());
    assert!(told.iter().any(removed), "{told:?}");
    cluster.world.run(2 * SECOND);
    assert!(cluster.have(name).is_empty());
    cluster.all_idle();
}

// Goal: a home that believes in what is not there does so until somebody stumbles over it, and no longer. Method: it is told
// of an object in a member's name, as by a word that is late; then somebody asks for it in each way.
#[test]
fn a_stale_hint_goes_when_somebody_stumbles_over_it() {
    let mut cluster = Cluster::new(22, &NODES);
    for name in 0..36 {
        let (home, others) = home_and_others(&cluster, name);
        let blocks = 1 + u32::from(name) % 2;
        cluster.mislead(home, others[0], name, blocks);
        if name % 3 == 0 {
            cluster.mislead(home, others[1], name, blocks);
        }
        // The home, who is believed to have it, or another one.
        let asker = [home, others[0], others[2]][usize::from(name) / 12];
        assert!(cluster.exists(others[1], name), "a hint is believed");
        match name % 4 {
            0 | 1 => assert_eq!(cluster.get(asker, name), None),
            2 => assert_eq!(cluster.put(asker, name, 1, 1), Some(false)),
            _ => drop(cluster.copies(asker, name, 4)),
        }
        cluster.world.run(SECOND);
        assert!(!cluster.exists(others[1], name), "{name}");
        assert_eq!(cluster.put(asker, name, 2, blocks), Some(true), "{name}");
        let value = cluster.verify(asker, name);
        assert!(NODES.iter().all(|node| cluster.get(node, name) == value), "{name}");
    }
    // What is there is believed in, whoever doubts it.
    assert_eq!(cluster.put("a", 40, 1, 1), Some(true));
    assert_eq!(cluster.put("b", 40, 1, 1), Some(false));
    cluster.world.run(SECOND);
    assert_eq!(cluster.put("c", 40, 1, 1), Some(false));
    cluster.all_idle();
}

// Goal: a home that had to forget knows all again when it has room. Method: it is told of as many objects as it can know in a
// member's name, and that they are gone.
#[test]
fn what_a_home_forgot_it_is_told_anew() {
    let mut cluster = Cluster::new(23, &NODES);
    (0..20).for_each(|name| assert_eq!(cluster.put(NODES[usize::from(name) % 4], name, 1, 1), Some(true)));
    let sure = |cluster: &Cluster| {
        let book = cluster.world.engine("a").expect("it lives").book();
        let book = book.read().expect("nobody has panicked");
        let known = (0..20_u8).filter(|name| cluster.home(*name) == "a");
        (book.is_sure(), known.filter(|name| book.hinted(&name_key(u64::from(*name))).is_none()).count())
    };
    assert_eq!(sure(&cluster), (true, 0));
    // All nodes tell, the home itself too; and one that comes and goes meanwhile is in nobody's way.
    for disturbed in [false, true] {
        let heads: Vec<Head> =
            (0..1_u64 << 16).map(|name| Head { key: name_key(1000 + name), value: name_key(0), class: 0 }).collect();
        cluster.tell("a", "b", heads.iter().map(|head| (*head, true)).collect());
        let (certain, forgotten) = sure(&cluster);
        assert!(!certain && forgotten > 0, "{forgotten} were forgotten");
        cluster.tell("a", "b", heads.iter().map(|head| (*head, false)).collect());
        let mut disturbs = disturbed;
        let until = cluster.world.now() + 200 * SECOND;
        while cluster.world.now() < until {
            cluster.world.step();
            let (certain, forgotten) = sure(&cluster);
            assert!(!certain || forgotten == 0, "sure, and {forgotten} are not known");
            let complete = cluster.world.engine("a").expect("it lives").book().read().expect("whole").hints.complete();
            if complete && std::mem::take(&mut disturbs) {
                cluster.world.break_session("a", "c");
            }
        }
        assert_eq!(sure(&cluster), (true, 0));
    }
    for name in 0..20 {
        assert!(NODES.iter().all(|node| cluster.exists(node, name) && !cluster.exists(node, 100 + name)));
        assert_eq!(cluster.put("c", name, 2, 1), Some(false));
    }
    cluster.all_idle();
}

#[test]
fn what_is_removed_while_it_is_got_is_gone() {
    let mut cluster = Cluster::new(18, &NODES);
    let mut got = 0;
    for name in 0..60 {
        assert_eq!(cluster.put("a", name, 1, if name % 4 == 0 { 2 } else { 1 }), Some(true));
        let asked: Vec<_> = NODES[1..].iter().map(|node| (*node, cluster.begin_get(node, name))).collect();
        for _ in 0..name {
            cluster.world.step();
        }
        assert!(cluster.remove("a", name).1.is_empty());
        got += asked.into_iter().filter_map(|(node, ticket)| cluster.got(node, name, ticket)).count();
        assert!(NODES.iter().all(|node| cluster.get(node, name).is_none()), "{name}");
        cluster.world.run(2 * SECOND);
        assert!(cluster.have(name).is_empty());
    }
    cluster.all_idle();
    assert_eq!(got, 0, "after a removal nothing is got");
}

#[test]
fn of_many_that_put_one_name_at_once_one_wins() {
    let mut cluster = Cluster::new(2, &NODES);
    for name in 0..30 {
        let begun: Vec<_> =
            NODES.iter().map(|node| (*node, cluster.begin_reserve(node, name, u64::from(name)))).collect();
        let slots: Vec<&str> = begun
            .into_iter()
            .filter_map(|(node, ticket)| match cluster.reserved(node, ticket)[..] {
                [Reserved::Slot { .. }] => Some(node),
                [Reserved::There] => None,
                ref other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(slots.len(), 1, "one may put {name}");
    }
}

#[test]
fn a_put_that_is_given_up_gives_the_name_back() {
    let mut cluster = Cluster::new(3, &NODES);
    let (home, others) = home_and_others(&cluster, 7);
    for node in [home, others[0]] {
        let ticket = cluster.begin_reserve(node, 7, 1);
        assert!(matches!(cluster.reserved(node, ticket)[..], [Reserved::Slot { .. }]));
        assert_eq!(cluster.put(others[1], 7, 5, 1), Some(false), "somebody is putting it");
        // One way and the other.
        if node == home {
            cluster.abandon_all(node)
        } else {
            cluster.client_dies(node)
        }
        cluster.world.run(SECOND);
    }
    let dead = others[0];
    let ticket = cluster.begin_reserve(dead, 7, 1);
    assert!(matches!(cluster.reserved(dead, ticket)[..], [Reserved::Slot { .. }]));
    cluster.kill(dead);
    cluster.world.run(SECOND);
    assert_eq!(cluster.put(others[1], 7, 5, 1), Some(true));
}

#[test]
fn removed_means_everywhere() {
    let mut cluster = Cluster::new(4, &NODES);
    for name in 0..8 {
        let node = NODES[usize::from(name) % 4];
        assert_eq!(cluster.put(node, name, 1, if name < 2 { 2 } else { 1 }), Some(true));
        assert_eq!(cluster.copies(node, name, 3), 3);
        assert_eq!(cluster.have(name).len(), 3);
        assert_eq!(cluster.remove(NODES[usize::from(name + 1) % 4], name), (true, vec![]));
        assert_eq!(cluster.remove(node, name), (false, vec![]), "there is none any more");
        assert!(cluster.have(name).is_empty() && NODES.iter().all(|node| !cluster.exists(node, name)));
        assert_eq!(cluster.put(NODES[0], name, 2, 1), Some(true), "a new one may come");
        assert!(cluster.exists(NODES[1], name));
    }
}

#[test]
fn who_cannot_be_told_of_a_removal_is_named_and_learns_it_later() {
    let mut cluster = Cluster::new(5, &NODES);
    let (home, others) = home_and_others(&cluster, 1);
    let away = others[0];
    assert_eq!(cluster.put(away, 1, 1, 1), Some(true));
    assert_eq!(cluster.copies(away, 1, 4), 4);
    cluster.cut_off(away);
    cluster.world.run(20 * SECOND);
    let (removed, missing) = cluster.remove(others[1], 1);
    assert!(removed && missing == [away], "{missing:?}");
    assert_eq!(cluster.have(1), [away], "removed elsewhere");
    cluster.bring_back(away);
    cluster.world.run(20 * SECOND);
    assert!(cluster.have(1).is_empty(), "its home {home} has told it");
    assert_eq!(cluster.remove(others[1], 1), (false, vec![]));
}

// Goal: a removal reaches all values of a name and all who hold them, or names who may. Method: nodes put a value each while
// none reaches another; then they meet, and one of them removes the name after so many steps.
#[test]
fn a_removal_reaches_all_values_or_names_who_may_have_one() {
    let mut cluster = Cluster::new(24, &NODES);
    let (mut several, mut reached) = (0, 0);
    for name in 0..40 {
        NODES.iter().for_each(|node| cluster.cut_off(node));
        cluster.world.run(10 * SECOND);
        for (value, node) in (1..).zip(&NODES[..3]) {
            assert_eq!(cluster.put(node, name, value, 1), Some(true));
        }
        NODES.iter().for_each(|node| cluster.bring_back(node));
        for _ in 0..u64::from(name) * 5 {
            cluster.world.step();
        }
        several += usize::from(cluster.verify_all(name).len() > 1);
        let (_, missing) = cluster.remove(NODES[usize::from(name) % 4], name);
        let have = cluster.have(name);
        assert!(have.iter().all(|node| missing.contains(node)), "{name}: {have:?}, and missing {missing:?}");
        reached += usize::from(missing.is_empty());
        cluster.world.run(20 * SECOND);
        cluster.remove("d", name);
    }
    assert!(several > 5 && reached > 5, "{several} {reached}");
    cluster.all_idle();
}

// Goal: what a home forgets because of a removal is gone. Method: a holder has no session with who removes, but with the home.
#[test]
fn a_home_passes_a_removal_on() {
    let mut cluster = Cluster::new(25, &NODES);
    for name in 0..12 {
        let (_, others) = home_and_others(&cluster, name);
        let (holder, remover) = (others[0], others[1]);
        assert_eq!(cluster.put(holder, name, 1, 1), Some(true));
        cluster.world.cut(holder, remover);
        cluster.world.run(10 * SECOND);
        let (_, missing) = cluster.remove(remover, name);
        assert_eq!(missing, [holder]);
        cluster.world.run(5 * SECOND);
        assert!(cluster.have(name).is_empty(), "{name} is there though its home has been told");
        cluster.world.heal(holder, remover);
        cluster.world.run(10 * SECOND);
    }
    cluster.all_idle();
}

#[test]
fn two_values_that_meet_become_one() {
    let mut cluster = Cluster::new(6, &NODES);
    for name in 0..6 {
        let away = NODES[usize::from(name) % 4];
        let other = NODES[usize::from(name + 1) % 4];
        cluster.cut_off(away);
        cluster.world.run(20 * SECOND);
        assert_eq!(cluster.put(away, name, 10, 1), Some(true), "nobody can be asked");
        assert_eq!(cluster.put(other, name, 20, 1), Some(true));
        cluster.bring_back(away);
        cluster.world.run(20 * SECOND);
        let have = cluster.have(name);
        assert!(have == [away] || have == [other], "{have:?}");
    }
}

#[test]
fn the_home_dies_and_nothing_is_forgotten() {
    let mut cluster = Cluster::new(7, &NODES);
    for name in 0..20 {
        let (home, others) = home_and_others(&cluster, name);
        assert_eq!(cluster.put(others[0], name, 1, 1), Some(true));
        cluster.kill(home);
        // At once, before the others have told the new home.
        assert_eq!(cluster.put(others[1], name, 2, 1), Some(false), "{home} is dead, but the value is not");
        assert!(cluster.exists(others[2], name));
        cluster.start(home);
        cluster.world.run(5 * SECOND);
        assert!(cluster.exists(home, name));
        assert_eq!(cluster.remove(home, name), (true, vec![]));
    }
}

#[test]
fn a_member_that_comes_later_finds_all_and_is_told_all() {
    let mut cluster = Cluster::new(8, &NODES[..2]);
    for name in 0..250 {
        assert_eq!(cluster.put(NODES[usize::from(name) % 2], name, 1, 1), Some(true));
    }
    cluster.start("c");
    cluster.world.run(5 * SECOND);
    for name in 0..250 {
        assert!(cluster.exists("c", name), "{name}");
        assert_eq!(cluster.put("c", name, 2, 1), Some(false));
    }
}

#[test]
fn copies_are_where_they_were_ordered() {
    let mut cluster = Cluster::new(9, &NODES);
    for (name, blocks) in [(0, 1), (1, 1), (2, 3)] {
        assert_eq!(cluster.put("a", name, 1, blocks), Some(true));
        for wanted in [1, 2, 2, 4, 9] {
            // From any node, whether it has it or not.
            assert_eq!(cluster.copies(NODES[wanted % 4], name, wanted as u32), wanted.min(4) as u32);
            assert_eq!(cluster.have(name).len(), wanted.min(4));
        }
        cluster.verify_all(name);
    }
    assert_eq!(cluster.copies("a", 50, 2), 0, "there is none");
}

#[test]
fn a_copy_of_which_a_part_is_damaged_is_none() {
    let mut cluster = Cluster::new(10, &NODES);
    assert_eq!(cluster.put("a", 1, 1, 3), Some(true));
    cluster.damage("a", 1, 1);
    assert_eq!(cluster.copies("b", 1, 2), 1);
    // The part that was found rotten is gone, and so all of it.
    cluster.world.run(SECOND);
    assert!(cluster.have(1).is_empty());
    cluster.all_idle();
}

#[test]
fn a_lying_holder_is_replaced() {
    let mut cluster = Cluster::new(11, &NODES);
    for name in 0..12 {
        assert_eq!(cluster.put("a", name, 1, 1), Some(true));
        assert_eq!(cluster.copies("a", name, 2), 2);
        let liar = cluster.have(name)[usize::from(name) % 2].clone();
        cluster.damage(&liar, name, 0);
        assert_eq!(cluster.copies("a", name, 3), 3, "from the other one");
        for node in cluster.have(name).iter().filter(|node| **node != liar) {
            cluster.verify(node, name);
        }
    }
}

#[test]
fn a_holder_dies_while_it_sends() {
    let mut cluster = Cluster::new(12, &NODES);
    let mut stood = 0;
    for name in 0..10 {
        assert_eq!(cluster.put("a", name, 1, 2), Some(true));
        assert_eq!(cluster.copies("a", name, 2), 2);
        let other = cluster.have(name).into_iter().find(|node| node != "a").expect("two");
        let asker = NODES.into_iter().find(|node| *node != "a" && *node != other).expect("four");
        let ticket = cluster.begin_copies(asker, name, 4);
        for _ in 0..5 + u64::from(name) * 3 {
            cluster.world.step();
        }
        cluster.kill(&other);
        let copies = cluster.copied(asker, ticket);
        assert!(copies >= 2, "{copies}");
        stood += usize::from(cluster.have(name).len() >= 3);
        cluster.start(&other);
        cluster.world.run(5 * SECOND);
        cluster.verify_all(name);
        assert!(cluster.remove("a", name).0);
    }
    assert!(stood >= 8, "{stood} of 10 were copied from the other holder");
    cluster.all_idle();
}

// Goal: whoever cannot say which blocks an object has keeps nobody waiting. Method: its holder does not listen; or the asker
// has no session with it when the home names it, and gets one at once. Then with a second holder, which gives it.
#[test]
fn a_holder_that_does_not_answer_keeps_nobody_waiting() {
    let mut cluster = Cluster::new(24, &NODES);
    for (name, deaf) in (0..12).flat_map(|name| [(name, true), (name, false)]) {
        let second = match &*cluster.home(name) {
            "c" => "d",
            "d" => "c",
            _ => continue,
        };
        assert_eq!(cluster.put("a", name, 1, 2), Some(true));
        let value = cluster.verify("a", name);
        for others in [false, true] {
            if others {
                assert_eq!(cluster.get(second, name), value);
                cluster.world.run(SECOND);
            }
            if deaf {
                cluster.world.deafen("a");
            } else {
                cluster.world.cut("a", "b");
                cluster.world.run(20 * SECOND);
            }
            let asked = cluster.world.now();
            let ticket = cluster.begin_get("b", name);
            cluster.world.run(SECOND / 50);
            cluster.world.heal("a", "b");
            assert_eq!(cluster.got("b", name, ticket), value.filter(|_| others), "{name}");
            let within = if deaf { 5 * SECOND } else { SECOND };
            assert!(cluster.world.now() - asked < within, "{name}: who has no session is not waited for");
            cluster.world.listen("a");
            cluster.world.run(20 * SECOND);
        }
        assert!(NODES.iter().all(|node| cluster.get(node, name) == value), "{name}");
        assert_eq!(cluster.remove(second, name), (true, vec![]));
    }
    cluster.all_idle();
}

#[test]
fn what_is_removed_while_it_is_copied_is_gone() {
    let mut cluster = Cluster::new(13, &NODES);
    for name in 0..40 {
        assert_eq!(cluster.put("a", name, 1, if name % 4 == 0 { 2 } else { 1 }), Some(true));
        let ticket = cluster.begin_copies("a", name, 4);
        for _ in 0..name {
            cluster.world.step();
        }
        let (_, missing) = cluster.remove("b", name);
        assert!(missing.is_empty());
        cluster.copied("a", ticket);
        cluster.world.run(SECOND);
        assert!(cluster.have(name).is_empty(), "{name}: {:?}", cluster.have(name));
    }
    cluster.all_idle();
}

#[test]
fn a_node_that_drains_leaves_what_only_it_has() {
    let mut cluster = Cluster::new(14, &NODES);
    for name in 0..30 {
        assert_eq!(cluster.put("a", name, 1, if name == 3 { 2 } else { 1 }), Some(true));
    }
    assert_eq!(cluster.copies("a", 5, 2), 2);
    let before: BTreeSet<String> = cluster.have(5).into_iter().collect();
    cluster.drain("a");
    cluster.world.run(5 * SECOND);
    cluster.all_idle();
    assert_eq!(cluster.moved("a"), 29);
    cluster.kill("a");
    for name in 0..30 {
        assert!(cluster.exists("b", name), "{name}");
        cluster.verify_all(name);
    }
    assert!(cluster.have(5).into_iter().all(|node| before.contains(&node)), "that one was safe");
}

#[test]
fn a_node_that_drains_takes_no_copies() {
    let mut cluster = Cluster::new(15, &NODES[..2]);
    assert_eq!(cluster.put("a", 1, 1, 1), Some(true));
    cluster.drain("b");
    assert_eq!(cluster.copies("a", 1, 2), 1);
    assert_eq!(cluster.put_refused("b", 2), Refusal::Full);
}

// -- random operations -----------------------------------------------------------------------------------------------

/// What a name may have.
#[derive(Default)]
struct Name {
    /// Values that were put, and were not removed since.
    values: BTreeSet<[u8; 16]>,
    /// Values that were removed from all nodes.
    removed: BTreeSet<[u8; 16]>,
    /// A removal did not reach all: what it found may come back until all are together again.
    half_removed: bool,
}

struct Model {
    cluster: Cluster,
    random: Random,
    names: BTreeMap<u8, Name>,
    cut: BTreeSet<&'static str>,
    puts: u64,
    done: Done,
}

/// What has happened: a model that never gets anywhere proves nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    stored: u64,
    refused: u64,
    got: u64,
    missed: u64,
    removed: u64,
    met: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        let faults = Faults { corrupt: 20, lose: 20, ..Faults::default() };
        let cluster = Cluster::with(seed, &NODES, faults);
        let (names, cut, done) = Default::default();
        Self { cluster, random: Random(seed ^ 0xABCD), names, cut, puts: 0, done }
    }

    fn node(&mut self) -> &'static str {
        NODES[self.random.below(4) as usize]
    }

    /// A value that is there must be one that may be.
    fn may_be(&mut self, name: u8, value: [u8; 16]) {
        let known = &self.names[&name];
        let again = known.half_removed && known.removed.contains(&value);
        assert!(known.values.contains(&value) || again, "{name} is {value:?}, which was not put or was removed");
    }

    fn step(&mut self) {
        let (node, name) = (self.node(), self.random.below(10) as u8);
        self.names.entry(name).or_default();
        match self.random.below(100) {
            0..30 => {
                self.puts += 1;
                let blocks = if self.random.permille(100) { 2 } else { 1 };
                match self.cluster.put(node, name, self.puts, blocks) {
                    Some(true) => {
                        self.done.stored += 1;
                        let value = self.cluster.verify(node, name);
                        self.names.get_mut(&name).expect("known").values.extend(value);
                    }
                    Some(false) => self.done.refused += 1,
                    None => {}
                }
            }
            30..60 => {
                let (other, at_once) = (self.node(), self.random.permille(500));
                let ticket = self.cluster.begin_get(node, name);
                let second = at_once.then(|| self.cluster.begin_get(other, name));
                for (node, ticket) in [(node, Some(ticket)), (other, second)] {
                    let Some(ticket) = ticket else { continue };
                    match self.cluster.got(node, name, ticket) {
                        Some(value) => {
                            self.done.got += 1;
                            self.may_be(name, value);
                        }
                        None => self.done.missed += 1,
                    }
                }
            }
            60..70 => {
                let wanted = 1 + self.random.below(4) as u32;
                self.cluster.copies(node, name, wanted);
            }
            70..80 => {
                let copying =
                    self.random.permille(300).then(|| (self.node(), self.cluster.begin_copies(node, name, 4)));
                let (removed, missing) = self.cluster.remove(node, name);
                self.done.removed += u64::from(removed);
                let known = self.names.get_mut(&name).expect("known");
                let values = std::mem::take(&mut known.values);
                known.removed.extend(values);
                known.half_removed |= !missing.is_empty();
                if missing.is_empty() && !known.half_removed {
                    assert!(
                        self.cluster.have(name).is_empty(),
                        "removed from all, and there: {:?}",
                        self.cluster.have(name)
                    );
                }
                if let Some((_, ticket)) = copying {
                    self.cluster.copied(node, ticket);
                }
            }
            80..84 => {
                self.cluster.kill(node);
                self.random.permille(700).then(|| self.cluster.world.run(SECOND / 2));
                self.cluster.start(node);
            }
            84..88 if self.cut.is_empty() => {
                self.cut.insert(node);
                self.cluster.cut_off(node);
            }
            88..92 => self.heal(),
            92..95 => {
                let other = self.node();
                self.cluster.world.break_session(node, other);
            }
            95..97 => self.cluster.client_dies(node),
            _ => self.cluster.world.run(SECOND * self.random.below(10)),
        }
    }

    fn heal(&mut self) {
        for node in std::mem::take(&mut self.cut) {
            self.cluster.bring_back(node);
        }
    }

    /// When all are together again, all agree.
    fn settle(&mut self) {
        self.heal();
        self.cluster.world.run(60 * SECOND);
        for name in 0..10 {
            let values = self.cluster.verify_all(name);
            assert!(values.len() <= 1, "{name} has {values:?}");
            let exists: BTreeSet<bool> = NODES.iter().map(|node| self.cluster.exists(node, name)).collect();
            assert_eq!(exists, BTreeSet::from([!values.is_empty()]), "{name}");
            let Some(value) = values.first().copied() else { continue };
            self.may_be(name, value);
            self.done.met += 1;
            let (removed, missing) = self.cluster.remove(NODES[0], name);
            assert!(removed && missing.is_empty(), "{missing:?}");
            assert!(self.cluster.have(name).is_empty());
        }
        NODES.iter().for_each(|node| self.cluster.client_dies(node));
        self.cluster.world.run(20 * SECOND);
        self.cluster.all_idle();
    }
}

fn model(seed: u64) -> Done {
    let mut model = Model::new(seed);
    for _ in 0..150 {
        model.step();
    }
    model.settle();
    model.done
}

#[test]
fn random_operations_keep_the_promises() {
    let first = std::env::var("PYENGINE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = first.map_or(0..12, |seed| seed..seed + 1);
    let mut done = Done::default();
    for seed in seeds {
        match catch_unwind(AssertUnwindSafe(|| model(seed))) {
            Ok(more) => {
                done.stored += more.stored;
                done.refused += more.refused;
                done.got += more.got;
                done.missed += more.missed;
                done.removed += more.removed;
                done.met += more.met;
            }
            Err(panic) => {
                eprintln!("repeat with PYENGINE_SEED={seed} cargo nextest run --test nodes random");
                resume_unwind(panic);
            }
        }
    }
    let Done { stored, refused, got, missed, removed, met } = done;
    let reached = stored > 100 && refused > 50 && got > 100 && missed > 20 && removed > 20 && met > 10;
    assert!(reached || first.is_some(), "{done:?}");
}
