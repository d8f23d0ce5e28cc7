"""What a broker does in a PostgreSQL journal, as functions of the database: one call is one transaction.

The server begins with a call when it has received the whole of it. So no transaction waits for a broker, and a broker
that freezes holds no lock.

Fences. A call that writes as a broker, or takes its jobs, locks the broker's row. Each statement of a function sees
what was committed before it began. So after the lock, `active` says which jobs the broker holds, and that does not
change until the transaction ends.

A broker that gave a connection up claims its row for the next connection, with another token. So a call that the server
has received, but carries out late, has no effect. The claim waits for a call that is being carried out.

A group's number is kept in the broker's row, in the same transaction. A group that is written again is recognized by
it, and has no further effect. Its transaction writes even so, since only then its commit waits for a standby.

`active` has no index of brokers: a broker's jobs are many and those of a group few, so they are found by `job_id`.

Rule: a released function never changes. A later step adds another one, since brokers of both versions run for a time.
"""

from __future__ import annotations

REGISTER = """
CREATE FUNCTION specq.register(p_token bigint, p_name text, p_address text, p_lease float8, p_floor bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE v_number bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(1936745329);  -- no other number meanwhile: `take` shares this lock
    v_number := nextval('specq.numbers');
    IF v_number < p_floor THEN
        v_number := setval('specq.numbers', p_floor);
    END IF;
    DELETE FROM specq.brokers WHERE number = v_number;  -- of a former primary
    UPDATE specq.brokers SET until = clock_timestamp()  -- the broker that was at this address is gone
        WHERE address = p_address AND address <> '' AND until > clock_timestamp();
    INSERT INTO specq.brokers (number, token, name, address, until)
        VALUES (v_number, p_token, p_name, p_address, clock_timestamp() + make_interval(secs => p_lease));
    RETURN v_number;
END $$;
"""

CLAIM = """
CREATE FUNCTION specq.claim(p_broker bigint, p_former bigint[], p_token bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE specq.brokers SET token = p_token WHERE number = p_broker AND token = ANY(p_former);
    RETURN FOUND;
END $$;
"""

# A lease that a failover forgets is renewed a second later, so nobody waits for the disk.
RENEW = """
CREATE FUNCTION specq.renew(p_broker bigint, p_token bigint, p_lease float8) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE specq.brokers SET until = clock_timestamp() + make_interval(secs => p_lease)
        WHERE number = p_broker AND token = p_token;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(SELECT address FROM specq.brokers WHERE until > clock_timestamp()
        AND address <> '' ORDER BY address);
END $$;
"""

WRITE = """
CREATE FUNCTION specq.write_group(
    p_broker bigint, p_token bigint, p_group bigint, p_after bigint, p_running bigint, p_dropped bigint[],
    p_new bigint[], p_owner text[], p_tenant text[], p_cache_salt text[], p_label text[], p_model text[],
    p_params text[], p_speculation text[], p_priority bigint[], p_submitted float8[], p_deadline float8[],
    p_prompt_ids bytea[],
    p_touched bigint[],
    p_bound bigint[], p_weights text[], p_placed bigint[],
    p_crashed bigint[], p_deaths bigint[], p_lone_deaths bigint[], p_death_length bigint[],
    p_job bigint[], p_base_len bigint[], p_token_ids bytea[], p_origins bytea[], p_logprobs bytea[], p_rounds bigint[],
    p_draft_tokens bigint[], p_cached_tokens bigint[], p_size bigint,
    p_finish text[], p_ended float8[], p_code text[], p_reason text[], p_stats text[], p_num_bytes bigint[],
    p_all_token_ids bytea[], p_all_origins bytea[], p_all_logprobs bytea[], p_done bigint[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_gone bigint[];
    v_refused bigint[] := '{}';
    v_number bigint;
    v_last bigint;
    v_bytes bigint := 0;
BEGIN
    UPDATE specq.brokers SET last_group = p_group, running = p_running, refused = '{}',
            refused_before = CASE WHEN p_after > 0 THEN refused ELSE '{}' END,
            until = greatest(until, clock_timestamp() + interval '3 s')  -- groups of a slow server renew the lease, too
        WHERE number = p_broker AND token = p_token AND last_group < p_group AND last_group >= p_after;
    IF NOT FOUND THEN  -- the group was written before; an update all the same, for the standby
        UPDATE specq.brokers SET running = p_running WHERE number = p_broker AND token = p_token
            RETURNING last_group, CASE WHEN last_group > p_group THEN refused_before || refused ELSE refused END
            INTO v_last, v_refused;
        IF v_last < p_group THEN
            RAISE EXCEPTION 'group % was not written, so group % is not', p_after, p_group;
        END IF;
        RETURN v_refused;  -- NULL if there is no such broker
    END IF;
    v_number := nextval('specq.commit_numbers');
    IF cardinality(p_dropped) > 0 THEN
        WITH gone AS (DELETE FROM specq.active WHERE job_id = ANY(p_dropped)
            AND broker = p_broker RETURNING job_id)
            SELECT array_agg(job_id) INTO v_gone FROM gone;
        DELETE FROM specq.jobs WHERE job_id = ANY(v_gone);
        DELETE FROM specq.folded WHERE job_id = ANY(v_gone);
        v_refused := ARRAY(SELECT unnest(p_dropped) EXCEPT SELECT unnest(v_gone) EXCEPT SELECT unnest(p_touched));
    END IF;
    IF cardinality(p_new) > 0 THEN
        WITH added AS (
            INSERT INTO specq.jobs (job_id, owner, tenant, cache_salt, label, model, params, speculation, priority,
                    submitted, deadline, prompt_ids)
                SELECT * FROM unnest(p_new, p_owner, p_tenant, p_cache_salt, p_label, p_model, p_params,
                    p_speculation, p_priority, p_submitted, p_deadline, p_prompt_ids)
                ON CONFLICT (job_id) DO NOTHING RETURNING job_id
        )
        INSERT INTO specq.active (job_id, broker, since) SELECT job_id, p_broker, v_number FROM added;
    END IF;
    IF cardinality(p_bound) > 0 THEN
        UPDATE specq.active a SET weights = b.weights, placed = b.placed
            FROM unnest(p_bound, p_weights, p_placed) AS b(job_id, weights, placed)
            WHERE a.job_id = b.job_id AND a.broker = p_broker;
    END IF;
    IF cardinality(p_crashed) > 0 THEN
        UPDATE specq.active a
            SET deaths = c.deaths, lone_deaths = c.lone_deaths, death_length = c.death_length
            FROM unnest(p_crashed, p_deaths, p_lone_deaths, p_death_length)
                AS c(job_id, deaths, lone_deaths, death_length)
            WHERE a.job_id = c.job_id AND a.broker = p_broker;
    END IF;
    IF (SELECT count(*) FROM specq.active WHERE job_id = ANY(p_touched) AND broker = p_broker)
            < cardinality(p_touched) THEN
        v_refused := v_refused || ARRAY(
            SELECT t.job_id FROM unnest(p_touched) AS t(job_id)
            WHERE NOT EXISTS (SELECT FROM specq.active a WHERE a.job_id = t.job_id AND a.broker = p_broker)
        );
    END IF;
    IF cardinality(p_job) > 0 AND cardinality(v_refused) = 0 THEN
        INSERT INTO specq.groups VALUES (v_number, p_broker, p_size, p_job, p_base_len, p_token_ids,
            p_origins, p_logprobs, p_rounds, p_draft_tokens, p_cached_tokens);
    ELSIF cardinality(p_job) > 0 THEN
        INSERT INTO specq.groups SELECT v_number, p_broker, p_size, array_agg(job_id), array_agg(base_len),
                array_agg(token_ids), array_agg(origins), array_agg(logprobs), array_agg(rounds),
                array_agg(draft_tokens), array_agg(cached)
            FROM unnest(p_job, p_base_len, p_token_ids, p_origins, p_logprobs, p_rounds, p_draft_tokens,
                p_cached_tokens) AS c(job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached)
            WHERE job_id <> ALL(v_refused) HAVING count(*) > 0;
    END IF;
    IF cardinality(p_done) > 0 THEN
        WITH stored AS (
            INSERT INTO specq.results (weights, finish, ended, code, reason, stats, num_bytes, token_ids, origins,
                    logprobs, job_id)
                SELECT a.weights, e.finish, e.ended, e.code, e.reason, e.stats,
                    e.num_bytes + octet_length(j.prompt_ids) + octet_length(j.params), e.token_ids, e.origins,
                    e.logprobs, e.job_id
                FROM unnest(p_finish, p_ended, p_code, p_reason, p_stats, p_num_bytes, p_all_token_ids,
                    p_all_origins, p_all_logprobs, p_done) AS e(finish, ended, code, reason, stats, num_bytes,
                    token_ids, origins, logprobs, job_id)
                JOIN specq.active a ON a.job_id = e.job_id AND a.broker = p_broker
                JOIN specq.jobs j ON j.job_id = e.job_id
                RETURNING job_id, num_bytes
        )
        SELECT array_agg(job_id), coalesce(sum(num_bytes), 0) INTO v_gone, v_bytes FROM stored;
        DELETE FROM specq.active WHERE job_id = ANY(v_gone);
        DELETE FROM specq.folded WHERE job_id = ANY(v_gone);
    END IF;
    IF v_bytes > 0 OR cardinality(v_refused) > 0 THEN
        UPDATE specq.brokers SET refused = v_refused, stored = stored + v_bytes WHERE number = p_broker;
    END IF;
    RETURN v_refused;
END $$;
"""

# Rows of brokers that died a minute ago and hold nothing are deleted. If a dead broker's row is locked, a connection of
# that broker waits for the rest of a transaction, and is ended.
TAKE = """
CREATE FUNCTION specq.take(p_broker bigint, p_token bigint, p_lease float8, p_most bigint, p_unreadable bigint[])
RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_dead bigint[];
    v_taken bigint[];
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1936745329);
    UPDATE specq.brokers SET until = clock_timestamp() + make_interval(secs => p_lease)
        WHERE number = p_broker AND token = p_token;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_dead := ARRAY(SELECT number FROM specq.brokers WHERE until < clock_timestamp() FOR UPDATE SKIP LOCKED);
    IF EXISTS (SELECT FROM specq.brokers WHERE until < clock_timestamp() AND number <> ALL(v_dead)) THEN
        BEGIN
            PERFORM pg_terminate_backend(s.pid) FROM pg_stat_activity s JOIN specq.brokers b
                ON s.application_name = 'specq journal ' || b.number
                WHERE b.until < clock_timestamp() AND b.number <> ALL(v_dead) AND s.datname = current_database()
                AND s.wait_event = 'ClientRead' AND s.backend_xid IS NOT NULL;
        EXCEPTION WHEN insufficient_privilege THEN NULL;
        END;
    END IF;
    INSERT INTO specq.folded (number, job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens,
            cached_tokens)
        SELECT number, job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached_tokens
        FROM specq.unfolded WHERE broker = ANY(v_dead);
    DELETE FROM specq.groups WHERE broker = ANY(v_dead);
    WITH chosen AS (
        SELECT a.job_id FROM specq.active a JOIN specq.jobs j ON j.job_id = a.job_id
        WHERE (a.broker IS NULL OR a.broker = ANY(v_dead)) AND a.job_id <> ALL(p_unreadable)
        ORDER BY j.submitted, j.job_id LIMIT p_most FOR UPDATE OF a SKIP LOCKED
    ),
    number AS MATERIALIZED (SELECT nextval('specq.numbers') AS number WHERE EXISTS (SELECT FROM chosen)),
    taken AS (
        UPDATE specq.active a SET broker = p_broker, epoch = number.number << 32 FROM chosen, number
        WHERE a.job_id = chosen.job_id RETURNING a.job_id
    )
    SELECT coalesce(array_agg(job_id), '{}') INTO v_taken FROM taken;
    UPDATE specq.brokers SET running = 0 WHERE number = ANY(v_dead) AND running <> 0;
    WITH gone AS (
        DELETE FROM specq.brokers b WHERE number = ANY(v_dead) AND until < clock_timestamp() - interval '1 min'
            AND NOT EXISTS (SELECT FROM specq.active a WHERE a.broker = b.number) RETURNING stored
    )
    UPDATE specq.meta SET value = value + (SELECT sum(stored) FROM gone)
        WHERE name = 'stored' AND EXISTS (SELECT FROM gone);
    RETURN v_taken;
END $$;
"""

# It moves what is there already, so nobody waits for the disk.
FOLD = """
CREATE FUNCTION specq.fold(p_broker bigint, p_token bigint, p_size bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint;
    v_size bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM specq.brokers WHERE number = p_broker AND token = p_token FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT max(number), coalesce(sum(size), 0) INTO v_last, v_size FROM (
        SELECT number, size, sum(size) OVER (ORDER BY number) AS total
        FROM (SELECT number, size FROM specq.groups WHERE broker = p_broker ORDER BY number LIMIT 10000) AS oldest
    ) AS summed WHERE total - size < p_size;
    INSERT INTO specq.folded (number, job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens,
            cached_tokens)
        SELECT number, job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached_tokens
        FROM specq.unfolded WHERE broker = p_broker AND number <= v_last;
    DELETE FROM specq.groups WHERE broker = p_broker AND number <= v_last;
    RETURN v_size;
END $$;
"""

KEEP = """
CREATE FUNCTION specq.keep_to(
    p_broker bigint, p_token bigint, p_running bigint, p_most bigint, p_before float8, p_rows bigint, p_bytes bigint,
    OUT num_forgotten bigint, OUT is_full boolean
) LANGUAGE plpgsql AS $$
DECLARE
    v_surplus bigint;
    v_freed bigint;
BEGIN
    num_forgotten := 0;
    is_full := false;
    IF NOT pg_try_advisory_xact_lock(1936745330) THEN
        RETURN;  -- another broker does it
    END IF;
    UPDATE specq.brokers SET running = p_running WHERE number = p_broker AND token = p_token AND running <> p_running;
    SELECT coalesce(sum(stored + running), 0) + (SELECT value FROM specq.meta WHERE name = 'stored') - p_most
        INTO v_surplus FROM specq.brokers;
    IF v_surplus <= 0 AND p_before <= 0 THEN
        RETURN;
    END IF;
    WITH oldest AS (
        SELECT job_id, ended, sum(num_bytes) OVER (ORDER BY ended, job_id) - num_bytes AS freed
        FROM (SELECT job_id, ended, num_bytes FROM specq.results ORDER BY ended, job_id LIMIT p_rows) AS first
    ),
    gone AS (
        DELETE FROM specq.results r USING oldest o WHERE r.job_id = o.job_id
            AND (o.ended < p_before OR o.freed < v_surplus) AND o.freed < p_bytes RETURNING r.job_id, r.num_bytes
    ),
    requests AS (DELETE FROM specq.jobs j USING gone WHERE j.job_id = gone.job_id)
    SELECT count(*), coalesce(sum(num_bytes), 0) INTO num_forgotten, v_freed FROM gone;
    UPDATE specq.meta SET value = value - v_freed WHERE name = 'stored' AND v_freed > 0;
    is_full := v_surplus > 0 AND num_forgotten = 0;
END $$;
"""

# Times after the journal's: the database's clock was set back, or they come from elsewhere. They keep their order.
BRING_BACK = """
CREATE FUNCTION specq.bring_back(p_slack float8) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now float8 := extract(epoch FROM clock_timestamp());
    v_newest float8;
BEGIN
    SELECT greatest((SELECT max(ended) FROM specq.results),
        (SELECT max(submitted) FROM specq.jobs j JOIN specq.active a ON a.job_id = j.job_id)) INTO v_newest;
    IF v_newest > v_now + p_slack THEN
        UPDATE specq.results SET ended = v_now - 1e-5 * (v_newest - ended) WHERE ended > v_now;
        UPDATE specq.jobs j SET submitted = v_now - 1e-5 * (v_newest - submitted),
            deadline = CASE WHEN deadline > 0 THEN deadline - submitted + v_now ELSE deadline END
            FROM specq.active a WHERE a.job_id = j.job_id AND submitted > v_now;
    END IF;
END $$;
"""

# When a process ends, its connections end, and the others see it. The lease of a frozen or unreachable broker runs on.
# After a failover all connections are new, and renewals may be forgotten: for a lease's time nobody is called silent.
# Folding in steps keeps each taking short, however much text a dead broker had.
FOLD_LOST = """
CREATE FUNCTION specq.fold_lost(p_lease float8, p_silent float8, p_size bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE specq.brokers b SET until = v_now
        WHERE until > v_now AND until < v_now + make_interval(secs => p_lease - p_silent)
        AND NOT EXISTS (SELECT FROM pg_stat_activity s
            WHERE s.application_name = 'specq journal ' || b.number AND s.datname = current_database())
        AND EXISTS (SELECT FROM pg_stat_activity s
            WHERE s.pid = pg_backend_pid() AND s.backend_start < v_now - make_interval(secs => p_lease));
    RETURN (SELECT coalesce(max(specq.fold(number, token, p_size)), 0) FROM (
        SELECT number, token FROM specq.brokers b WHERE until < clock_timestamp()
            AND EXISTS (SELECT FROM specq.groups g WHERE g.broker = b.number)
            LIMIT 1 FOR UPDATE SKIP LOCKED) AS lost);
END $$;
"""

FUNCTIONS = REGISTER + CLAIM + RENEW + WRITE + TAKE + FOLD + KEEP + BRING_BACK
