//! Who may have cached KV of whom: only requests of one namespace share prefixes.
//!
//! Equal tokens have equal KV whatever their namespace, so a wrong sharing shows in no output. It shows in what nodes
//! say that they found: a run of cached tokens has to begin the context of another request that was given to the
//! same life of the same node under the same namespace.

use crate::message::ToClient;
use crate::network::{Call, Process};
use crate::world::World;
use tidemill_core::{RequestId, TokenId};
use tidemill_decode_node::node::GenerateEvent;
use tidemill_prefill_node::node::PrefillEvent;

impl World {
    /// A node is given a request.
    pub(crate) fn note_given(&mut self, process: Process, request_id: RequestId) {
        let Some(&request_idx) = self.attempts.get(&request_id) else {
            return;
        };
        match process {
            Process::Prefill(i) => self.prefills[i].given.push(request_idx),
            Process::Decode(i) => self.decodes[i].given.push(request_idx),
            Process::Router => {}
        }
    }

    /// A node says how much of a context it found in its cache.
    pub(crate) fn check_cached(&mut self, open: Call, message: &ToClient) {
        let n_cached = match message {
            ToClient::Prefill(PrefillEvent::FirstToken(first)) => first.n_cached_tokens,
            ToClient::Generate(GenerateEvent::KvReady(ready)) => ready.n_local_tokens,
            _ => return,
        };
        let Some(&request_idx) = open.about.and_then(|id| self.attempts.get(&id)) else {
            return;
        };
        let given = match open.server.process {
            Process::Prefill(i) => &self.prefills[i].given,
            Process::Decode(i) => &self.decodes[i].given,
            Process::Router => return,
        };
        let n_cached = n_cached as usize;
        let namespace = &self.requests[request_idx].job.namespace;
        let context: Vec<TokenId> = self.requests[request_idx].context().collect();
        // Its own former attempt counts, this one does not.
        let mut n_own = 0;
        let is_known = n_cached == 0
            || given.iter().any(|&other| {
                n_own += usize::from(other == request_idx);
                let other_request = &self.requests[other];
                (other != request_idx || n_own > 1)
                    && other_request.job.namespace == *namespace
                    && other_request
                        .context()
                        .take(n_cached)
                        .eq(context.iter().take(n_cached).copied())
            });
        if !is_known {
            let process = open.server.process;
            self.violate(format!(
                "{process:?} found {n_cached} cached tokens for request {request_idx}; nobody of its namespace \
                 brought them"
            ));
        }
    }
}
