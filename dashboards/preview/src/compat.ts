// Stands in for @grafana/plugin-compat/datasources, which picks its functions from whichever Grafana it runs in; here
// the data source service that app.tsx sets is all there is.
import { getDataSourceSrv } from '@grafana/runtime';

const service = () => getDataSourceSrv() as any;

export const getDataSourceInstance = async (ref: unknown, vars?: unknown) => service().get(ref, vars);
export const getDataSourceInstanceList = async (filters?: unknown) => service().getList(filters);
export const getDataSourceInstanceSettings = async (ref: unknown) => service().getInstanceSettings(ref);
export const getDefaultDataSourceInstanceListItem = async (list: Array<{ isDefault?: boolean }>) =>
  list.find((one) => one.isDefault) ?? list[0];
export const registerRuntimeDataSourceInstance = () => undefined;
