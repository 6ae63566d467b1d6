//! The part of libibverbs that this transport uses, loaded when it is first needed.
//!
//! Written from the public API (`infiniband/verbs.h`, rdma-core 44, ABI `IBVERBS_1.1`, stable since 2006). Nothing is
//! linked: a machine without `libibverbs.so.1` runs the same binary, and is told why it has no rdma. `post_send`,
//! `poll_cq` and `req_notify_cq` are inline functions in C; they go through the context's table of operations.
//! `tests/rdma.rs` compares sizes and offsets with a C compiler's where the headers are installed.
//!
//! # `unsafe`
//!
//! These are declarations. `device` and `queue` wrap them in types that own what they point to.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::OnceLock;

/// A device that the library lists; its inside is the library's own.
#[repr(C)]
pub struct Device {
    _private: [u8; 0],
}

/// A protection domain, of which only the address matters.
#[repr(C)]
pub struct ProtectionDomain {
    _private: [u8; 0],
}

/// An address handle; only ever null here.
type Opaque = *mut c_void;
type PollCq = unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int;
type RequestNotify = unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int;
type PostSend = unsafe extern "C" fn(*mut QueuePair, *mut SendWork, *mut *mut SendWork) -> c_int;

/// `struct ibv_context_ops`: 32 pointers, of which three are called.
#[repr(C)]
pub struct ContextOps {
    _before_poll: [Opaque; 11],
    /// `poll_cq`
    pub poll_cq: Option<PollCq>,
    /// `req_notify_cq`
    pub req_notify_cq: Option<RequestNotify>,
    _before_post: [Opaque; 12],
    /// `post_send`
    pub post_send: Option<PostSend>,
    _behind_post: [Opaque; 6],
}

/// `struct ibv_context` up to what is used; the library allocates it.
#[repr(C)]
pub struct Context {
    /// The device it was opened from.
    pub device: *mut Device,
    /// What is inline in C.
    pub ops: ContextOps,
    /// Descriptor of the kernel's interface.
    pub cmd_fd: c_int,
    /// Descriptor of asynchronous events.
    pub async_fd: c_int,
    /// How many completion vectors there are.
    pub num_comp_vectors: c_int,
}

/// `struct ibv_device_attr`
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct DeviceAttributes {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct PortAttributes {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// `IBV_PORT_ACTIVE`
pub const PORT_ACTIVE: c_uint = 4;
/// `IBV_LINK_LAYER_INFINIBAND`
pub const LINK_LAYER_INFINIBAND: u8 = 1;

/// `struct ibv_mr`
#[repr(C)]
#[allow(missing_docs)]
pub struct MemoryRegion {
    pub context: *mut Context,
    pub pd: *mut ProtectionDomain,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `IBV_ACCESS_LOCAL_WRITE`
pub const ACCESS_LOCAL_WRITE: c_int = 1;
/// `IBV_ACCESS_REMOTE_WRITE`
pub const ACCESS_REMOTE_WRITE: c_int = 2;
/// `IBV_ACCESS_REMOTE_READ`
pub const ACCESS_REMOTE_READ: c_int = 4;

/// `struct ibv_comp_channel`
#[repr(C)]
#[allow(missing_docs)]
pub struct CompletionChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// `struct ibv_cq` up to what is used; the library allocates it.
#[repr(C)]
#[allow(missing_docs)]
pub struct CompletionQueue {
    pub context: *mut Context,
    pub channel: *mut CompletionChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

/// `struct ibv_wc`
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct WorkCompletion {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `IBV_WC_SUCCESS`
pub const WC_SUCCESS: c_uint = 0;

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct QueueCapacity {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
#[allow(missing_docs)]
pub struct QueueInit {
    pub qp_context: *mut c_void,
    pub send_cq: *mut CompletionQueue,
    pub recv_cq: *mut CompletionQueue,
    pub srq: *mut c_void,
    pub cap: QueueCapacity,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `IBV_QPT_RC`
pub const QUEUE_RELIABLE: c_uint = 2;

/// `struct ibv_qp` up to what is used; the library allocates it.
#[repr(C)]
#[allow(missing_docs)]
pub struct QueuePair {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut ProtectionDomain,
    pub send_cq: *mut CompletionQueue,
    pub recv_cq: *mut CompletionQueue,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_global_route`; a `union ibv_gid` is 16 bytes with the alignment of its 64-bit halves.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `union ibv_gid`
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct Gid(pub [u8; 16]);

/// `struct ibv_ah_attr`
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct AddressVector {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct QueueAttributes {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QueueCapacity,
    pub ah_attr: AddressVector,
    pub alt_ah_attr: AddressVector,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `IBV_QPS_INIT`
pub const STATE_INIT: c_uint = 1;
/// `IBV_QPS_RTR`
pub const STATE_READY_TO_RECEIVE: c_uint = 2;
/// `IBV_QPS_RTS`
pub const STATE_READY_TO_SEND: c_uint = 3;

/// Bits of `enum ibv_qp_attr_mask`.
#[allow(missing_docs)]
pub mod mask {
    use std::ffi::c_int;

    pub const STATE: c_int = 1 << 0;
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const ADDRESS: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRY_COUNT: c_int = 1 << 10;
    pub const RNR_RETRY: c_int = 1 << 11;
    pub const RECEIVE_PSN: c_int = 1 << 12;
    pub const MAX_READS: c_int = 1 << 13;
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    pub const SEND_PSN: c_int = 1 << 16;
    pub const MAX_READS_SERVED: c_int = 1 << 17;
    pub const PEER_QUEUE: c_int = 1 << 20;
}

/// `struct ibv_sge`
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Piece {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`; of its unions only the member for one-sided operations is spelled out.
#[repr(C)]
#[allow(missing_docs)]
pub struct SendWork {
    pub wr_id: u64,
    pub next: *mut SendWork,
    pub sg_list: *mut Piece,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub _atomic: [u64; 2],
    pub _xrc: u32,
    pub _bind: [u64; 6],
}

/// `IBV_WR_RDMA_WRITE`
pub const WORK_WRITE: c_uint = 0;
/// `IBV_WR_RDMA_READ`
pub const WORK_READ: c_uint = 4;
/// `IBV_SEND_SIGNALED`
pub const SEND_SIGNALED: c_uint = 2;

macro_rules! library {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions, as loaded.
        #[allow(missing_docs)]
        pub struct Verbs {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Verbs {
            fn load() -> Result<Self, String> {
                // SAFETY: the library's initializer only registers drivers.
                let library = unsafe { libloading::Library::new("libibverbs.so.1") }
                    .map_err(|error| format!("no libibverbs.so.1 here (apt-get install ibverbs-providers): {error}"))?;
                let verbs = Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the type is the one that the public header declares for this symbol.
                        *unsafe { library.get(name.as_bytes()) }.map_err(|error| format!("libibverbs: {error}"))?
                    },)*
                };
                // Drivers keep threads and handlers of their own: it stays loaded for the life of the process.
                std::mem::forget(library);
                Ok(verbs)
            }
        }
    };
}

library! {
    fn ibv_fork_init() -> c_int;
    fn ibv_get_device_list(*mut c_int) -> *mut *mut Device;
    fn ibv_free_device_list(*mut *mut Device) -> ();
    fn ibv_get_device_name(*mut Device) -> *const c_char;
    fn ibv_open_device(*mut Device) -> *mut Context;
    fn ibv_close_device(*mut Context) -> c_int;
    fn ibv_query_device(*mut Context, *mut DeviceAttributes) -> c_int;
    fn ibv_query_port(*mut Context, u8, *mut PortAttributes) -> c_int;
    fn ibv_alloc_pd(*mut Context) -> *mut ProtectionDomain;
    fn ibv_dealloc_pd(*mut ProtectionDomain) -> c_int;
    fn ibv_reg_mr(*mut ProtectionDomain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
    fn ibv_dereg_mr(*mut MemoryRegion) -> c_int;
    fn ibv_create_comp_channel(*mut Context) -> *mut CompletionChannel;
    fn ibv_destroy_comp_channel(*mut CompletionChannel) -> c_int;
    fn ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompletionChannel, c_int) -> *mut CompletionQueue;
    fn ibv_destroy_cq(*mut CompletionQueue) -> c_int;
    fn ibv_get_cq_event(*mut CompletionChannel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(*mut CompletionQueue, c_uint) -> ();
    fn ibv_create_qp(*mut ProtectionDomain, *mut QueueInit) -> *mut QueuePair;
    fn ibv_modify_qp(*mut QueuePair, *mut QueueAttributes, c_int) -> c_int;
    fn ibv_destroy_qp(*mut QueuePair) -> c_int;
    fn ibv_wc_status_str(c_uint) -> *const c_char;
}

/// The library, loaded at the first call.
///
/// # Errors
/// A sentence that says what is missing; kept, as a library does not appear under a running process.
pub fn verbs() -> Result<&'static Verbs, &'static str> {
    static LOADED: OnceLock<Result<Verbs, String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let verbs = Verbs::load()?;
        // Pages that a card writes must not be copied away by a fork. A no-op on kernels since 5.12; before, it is refused
        // if somebody else in this process has used the library already, and then only a fork would harm.
        // SAFETY: no arguments.
        let code = unsafe { (verbs.ibv_fork_init)() };
        if code != 0 {
            tracing::warn!("rdma: memory is not safe from a fork of this process (ibv_fork_init: error {code})");
        }
        Ok(verbs)
    });
    loaded.as_ref().map_err(String::as_str)
}

/// A C name, this declaration's size or offset of it: what the test of the layout compares.
pub type Measure = (&'static str, usize);

/// Sizes and offsets of everything declared here, by the expressions that C has for them.
#[doc(hidden)]
pub fn measures() -> Vec<Measure> {
    use std::mem::size_of;
    vec![
        ("offsetof(struct ibv_context, ops.poll_cq)", offset_of!(Context, ops.poll_cq)),
        ("offsetof(struct ibv_context, ops.req_notify_cq)", offset_of!(Context, ops.req_notify_cq)),
        ("offsetof(struct ibv_context, ops.post_send)", offset_of!(Context, ops.post_send)),
        ("offsetof(struct ibv_context, async_fd)", offset_of!(Context, async_fd)),
        ("sizeof(struct ibv_device_attr)", size_of::<DeviceAttributes>()),
        ("offsetof(struct ibv_device_attr, max_qp_wr)", offset_of!(DeviceAttributes, max_qp_wr)),
        ("offsetof(struct ibv_device_attr, max_qp_rd_atom)", offset_of!(DeviceAttributes, max_qp_rd_atom)),
        ("offsetof(struct ibv_device_attr, max_qp_init_rd_atom)", offset_of!(DeviceAttributes, max_qp_init_rd_atom)),
        ("offsetof(struct ibv_device_attr, phys_port_cnt)", offset_of!(DeviceAttributes, phys_port_cnt)),
        ("sizeof(struct ibv_port_attr)", size_of::<PortAttributes>()),
        ("offsetof(struct ibv_port_attr, active_mtu)", offset_of!(PortAttributes, active_mtu)),
        ("offsetof(struct ibv_port_attr, lid)", offset_of!(PortAttributes, lid)),
        ("offsetof(struct ibv_port_attr, link_layer)", offset_of!(PortAttributes, link_layer)),
        ("sizeof(struct ibv_mr)", size_of::<MemoryRegion>()),
        ("offsetof(struct ibv_mr, lkey)", offset_of!(MemoryRegion, lkey)),
        ("offsetof(struct ibv_mr, rkey)", offset_of!(MemoryRegion, rkey)),
        ("offsetof(struct ibv_comp_channel, fd)", offset_of!(CompletionChannel, fd)),
        ("offsetof(struct ibv_cq, cqe)", offset_of!(CompletionQueue, cqe)),
        ("sizeof(struct ibv_wc)", size_of::<WorkCompletion>()),
        ("offsetof(struct ibv_wc, status)", offset_of!(WorkCompletion, status)),
        ("offsetof(struct ibv_wc, qp_num)", offset_of!(WorkCompletion, qp_num)),
        ("offsetof(struct ibv_wc, dlid_path_bits)", offset_of!(WorkCompletion, dlid_path_bits)),
        ("sizeof(struct ibv_qp_init_attr)", size_of::<QueueInit>()),
        ("offsetof(struct ibv_qp_init_attr, cap)", offset_of!(QueueInit, cap)),
        ("offsetof(struct ibv_qp_init_attr, qp_type)", offset_of!(QueueInit, qp_type)),
        ("offsetof(struct ibv_qp, qp_num)", offset_of!(QueuePair, qp_num)),
        ("sizeof(struct ibv_ah_attr)", size_of::<AddressVector>()),
        ("offsetof(struct ibv_ah_attr, dlid)", offset_of!(AddressVector, dlid)),
        ("offsetof(struct ibv_ah_attr, port_num)", offset_of!(AddressVector, port_num)),
        ("offsetof(struct ibv_global_route, sgid_index)", offset_of!(GlobalRoute, sgid_index)),
        ("sizeof(struct ibv_qp_attr)", size_of::<QueueAttributes>()),
        ("offsetof(struct ibv_qp_attr, ah_attr)", offset_of!(QueueAttributes, ah_attr)),
        ("offsetof(struct ibv_qp_attr, pkey_index)", offset_of!(QueueAttributes, pkey_index)),
        ("offsetof(struct ibv_qp_attr, port_num)", offset_of!(QueueAttributes, port_num)),
        ("offsetof(struct ibv_qp_attr, rnr_retry)", offset_of!(QueueAttributes, rnr_retry)),
        ("sizeof(struct ibv_sge)", size_of::<Piece>()),
        ("offsetof(struct ibv_sge, lkey)", offset_of!(Piece, lkey)),
        ("sizeof(struct ibv_send_wr)", size_of::<SendWork>()),
        ("offsetof(struct ibv_send_wr, opcode)", offset_of!(SendWork, opcode)),
        ("offsetof(struct ibv_send_wr, wr.rdma.remote_addr)", offset_of!(SendWork, remote_addr)),
        ("offsetof(struct ibv_send_wr, wr.rdma.rkey)", offset_of!(SendWork, rkey)),
        ("offsetof(struct ibv_send_wr, qp_type)", offset_of!(SendWork, _xrc)),
    ]
}

/// Constants used here, by their names in C.
#[doc(hidden)]
pub fn constants() -> Vec<Measure> {
    vec![
        ("IBV_PORT_ACTIVE", PORT_ACTIVE as usize),
        ("IBV_LINK_LAYER_INFINIBAND", usize::from(LINK_LAYER_INFINIBAND)),
        ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE as usize),
        ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE as usize),
        ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ as usize),
        ("IBV_WC_SUCCESS", WC_SUCCESS as usize),
        ("IBV_QPT_RC", QUEUE_RELIABLE as usize),
        ("IBV_QPS_INIT", STATE_INIT as usize),
        ("IBV_QPS_RTR", STATE_READY_TO_RECEIVE as usize),
        ("IBV_QPS_RTS", STATE_READY_TO_SEND as usize),
        ("IBV_WR_RDMA_WRITE", WORK_WRITE as usize),
        ("IBV_WR_RDMA_READ", WORK_READ as usize),
        ("IBV_SEND_SIGNALED", SEND_SIGNALED as usize),
        ("IBV_QP_STATE", mask::STATE as usize),
        ("IBV_QP_ACCESS_FLAGS", mask::ACCESS_FLAGS as usize),
        ("IBV_QP_PKEY_INDEX", mask::PKEY_INDEX as usize),
        ("IBV_QP_PORT", mask::PORT as usize),
        ("IBV_QP_AV", mask::ADDRESS as usize),
        ("IBV_QP_PATH_MTU", mask::PATH_MTU as usize),
        ("IBV_QP_TIMEOUT", mask::TIMEOUT as usize),
        ("IBV_QP_RETRY_CNT", mask::RETRY_COUNT as usize),
        ("IBV_QP_RNR_RETRY", mask::RNR_RETRY as usize),
        ("IBV_QP_RQ_PSN", mask::RECEIVE_PSN as usize),
        ("IBV_QP_MAX_QP_RD_ATOMIC", mask::MAX_READS as usize),
        ("IBV_QP_MIN_RNR_TIMER", mask::MIN_RNR_TIMER as usize),
        ("IBV_QP_SQ_PSN", mask::SEND_PSN as usize),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", mask::MAX_READS_SERVED as usize),
        ("IBV_QP_DEST_QPN", mask::PEER_QUEUE as usize),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: these declarations are the header's. Method: where a C compiler and the header are at hand, a program of
    // static assertions is compiled (not run); elsewhere the test says so and ends.
    #[test]
    fn declarations_agree_with_the_header() {
        let header = std::path::Path::new("/usr/include/infiniband/verbs.h");
        if !header.exists() {
            eprintln!("skipped: no {} (apt-get install libibverbs-dev)", header.display());
            return;
        }
        let asserts: String = measures()
            .into_iter()
            .chain(constants())
            .map(|(name, value)| format!("_Static_assert({name} == {value}, \"{name}\");\n"))
            .collect();
        let source =
            format!("#include <stddef.h>\n#include <infiniband/verbs.h>\n{asserts}int main(void) {{ return 0; }}\n");
        let mut compiler = std::process::Command::new("cc")
            .args(["-fsyntax-only", "-x", "c", "-"])
            .stdin(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("Rust links with it");
        std::io::Write::write_all(&mut compiler.stdin.take().expect("piped"), source.as_bytes()).expect("it reads");
        let output = compiler.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
